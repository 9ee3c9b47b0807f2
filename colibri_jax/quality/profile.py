"""What it costs to cut one layer alone, measured layer by layer, and the list of budgets that follows for a share of the expert bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax import __version__
from colibri_jax.config import ModelConfig
from colibri_jax.errors import OptionError, ProfileFileError
from colibri_jax.quality.costs import Int64
from colibri_jax.quality.report import make_report, rule
from colibri_jax.quality.run import Measured
from colibri_jax.quality.settings import FLOOR_POLICIES, Choices, Setting, make_settings
from colibri_jax.quality.steps import StepKind, StepShape
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, RoutingOptions

# Kinds of steps whose scored positions are those that the budget acts on.
PROFILE_KINDS: tuple[StepKind, ...] = ("decode", "verify", "prefill")
# Points of a frontier that are followed exactly. Five layers have fewer in all; hundreds of layers of equal experts too, in decoding.
MOST_POINTS = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCut:
    """One layer cut to N, all others whole.

    Attributes:
        budget: N.
        kld: mean over tokens, nats, against the model without a cut.
        kld_error: its standard error, of independent windows.
        kept: distinct experts of this layer, summed over the steps.
    """

    budget: int
    kld: float
    kld_error: float
    kept: int

    def __post_init__(self) -> None:
        _check_counts(self, budget=1, kept=0)
        for name in ("kld", "kld_error"):
            if type(getattr(self, name)) is not float or not math.isfinite(getattr(self, name)):
                raise ProfileFileError("not a finite number", where=name, expected="a number", got=repr(getattr(self, name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """One MoE layer.

    Attributes:
        layer: its index among all layers of the model.
        expert_bytes: of one expert with its scales.
        distinct: its experts without a cut, summed over the steps.
        cuts: ascending N, at least one.
    """

    layer: int
    expert_bytes: int
    distinct: int
    cuts: tuple[LayerCut, ...]

    def __post_init__(self) -> None:
        _check_counts(self, layer=0, expert_bytes=1, distinct=1)
        budgets = [cut.budget for cut in self.cuts]
        if not budgets or budgets != sorted(set(budgets)):
            raise ProfileFileError("not a list of cuts", where=f"layer {self.layer}", expected="ascending budgets", got=budgets)
        if max(cut.kept for cut in self.cuts) > self.distinct:
            raise ProfileFileError("more experts with a cut than without", where=f"layer {self.layer}", expected=f"at most {self.distinct}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """A model's layers, and how they were measured.

    Attributes:
        model: `quality.store.container_fingerprint`.
        shape: the steps.
        rule: routing options without a budget, as `rule_of` gives them.
        backend, precision, version: what computed it.
        text: names of the files.
        window: positions of a window.
        windows, tokens, steps: how many; tokens are scored ones, and steps those in which the budget acted.
        layers: in the model's order.

    Raises:
        ProfileFileError: a field is outside its domain.
    """

    model: str
    shape: StepShape
    rule: RoutingOptions
    backend: str
    precision: str
    version: str = __version__
    text: tuple[str, ...]
    window: int
    windows: int
    tokens: int
    steps: int
    layers: tuple[LayerSensitivity, ...]

    def __post_init__(self) -> None:
        _check_counts(self, window=1, windows=1, tokens=1, steps=1)
        texts = (self.model, self.backend, self.precision, self.version, *self.text)
        if not all(isinstance(text, str) and text for text in texts):
            raise ProfileFileError("not a text", where="model, backend, precision, version, text", expected="texts", got=texts)
        check_rule(self.shape, self.rule)
        if self.rule != rule_of(self.rule):
            raise ProfileFileError("a rule has no budget", where="rule", expected=rule_of(self.rule), got=self.rule)
        if not self.layers or self.base_bytes >= 2**63:
            raise ProfileFileError("layers out of range", where="layers", expected="one or more, of fewer than 2^63 bytes in all")

    @property
    def base_bytes(self) -> int:
        """Expert bytes of all steps without a cut."""
        return sum(layer.distinct * layer.expert_bytes for layer in self.layers)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a run has to have in common with the measurement for its lists to mean anything."""
        return (*steps_key(self.shape), self.rule)

    def describe(self) -> str:
        """Steps and rule, in words."""
        return describe_key(self.shape, self.rule)

    def to_json(self) -> dict[str, Any]:
        """Everything, as `from_json` takes it."""
        routing = {name: getattr(self.rule, name) for name in RULE_FIELDS}
        return dataclasses.asdict(self) | {"rule": routing, "text": list(self.text)}

    @classmethod
    def from_json(cls, raw: Any) -> Sensitivity:
        """What `to_json` wrote.

        Raises:
            ProfileFileError: it is something else.
            OptionError: steps or rule are none.
        """
        try:
            layers = tuple(LayerSensitivity(**layer | {"cuts": tuple(LayerCut(**cut) for cut in layer["cuts"])}) for layer in raw["layers"])
            shape, found = StepShape(**raw["shape"]), RoutingOptions(**raw["rule"])
            return cls(**raw | {"layers": layers, "shape": shape, "rule": found, "text": tuple(raw["text"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ProfileFileError("fields missing or unknown", where="profile", expected="those of a profile", got=error) from error


RULE_FIELDS = ("policy", "denominator", "vote", "floor")


def rule_of(routing: RoutingOptions) -> RoutingOptions:
    """The same options without a budget, and with defaults where the policy does not look."""
    return dataclasses.replace(
        routing,
        budget=0,
        floor=routing.floor if routing.policy in FLOOR_POLICIES else 1,
        route_top=RoutingOptions.route_top,
        route_within=RoutingOptions.route_within,
        allow_irreproducible=routing.policy in IRREPRODUCIBLE_POLICIES,
    )


def check_rule(shape: StepShape, routing: RoutingOptions) -> None:
    """Refuse what no profile can be measured of.

    Raises:
        OptionError: positions are scored that the budget does not act on, the policy's result depends on the cache, or other options cut
            as well, so that a layer would not be cut alone.
    """
    if shape.kind not in PROFILE_KINDS:
        raise OptionError("no profile of such steps", where="steps", expected=", ".join(PROFILE_KINDS), got=shape.kind)
    if routing.policy in IRREPRODUCIBLE_POLICIES:
        raise OptionError("no profile of a policy that looks at the cache", where="policy", expected="another", got=routing.policy)
    others = {"expert_topk": 0, "expert_topp": 0.0, "coverage": 1.0}
    for name, off in others.items():
        if getattr(routing, name) != off:
            raise OptionError("a layer would not be cut alone", where=name, expected=f"{off:g}", got=getattr(routing, name))


def steps_key(shape: StepShape) -> tuple[Any, ...]:
    """What of a shape the steps are made by in which the budget acts: their kind and their size."""
    return shape.kind, {"verify": shape.rows, "prefill": shape.chunk}.get(shape.kind, 1)


def describe_key(shape: StepShape, routing: RoutingOptions) -> str:
    """Steps and rule, in words."""
    kind, size = steps_key(shape)
    return f"{kind} {rule(dataclasses.replace(routing, budget=1))}" + (f", steps of {size}" if size > 1 else "")


# ---- measuring ------------------------------------------------------------------------------------------------------


def layer_settings(shape: StepShape, routing: RoutingOptions, budgets: Iterable[int], config: ModelConfig) -> list[Setting]:
    """The settings to measure: every layer alone with every budget, layer by layer, budgets ascending.

    Raises:
        OptionError: as `check_rule`; or a budget cuts nothing in these steps.
    """
    check_rule(shape, routing)
    ascending, layers = sorted(set(budgets)), len(config.moe_layers)
    lists = [tuple(n if index == layer else 0 for index in range(layers)) for layer in range(layers) for n in ascending]
    choices = Choices(
        budgets=lists,
        policies=(routing.policy,),
        denominators=(routing.denominator,),
        votes=(routing.vote,),
        floors=(routing.floor,),
    )
    settings = make_settings(shape, choices, config)
    acting = [setting for setting in settings if setting.routing.budget]
    if not lists or len(acting) < len(lists):
        raise OptionError("a budget that cuts nothing", where="budgets", expected="1 or more, fewer than a step can use", got=ascending)
    return acting


def sensitivity_of(
    measured: Measured,
    routing: RoutingOptions,
    bytes_L: Int64,
    config: ModelConfig,
    *,
    model: str,
    backend: str,
    precision: str,
    text: Sequence[str],
) -> Sensitivity:
    """What was measured of `layer_settings`.

    Args:
        measured: all of them, in their order.
        routing: the options that they were made of.
        bytes_L: of one expert, per MoE layer.
        model, backend, precision, text: as `Sensitivity` has them.
    """
    rows = make_report([measured], bytes_L, {}).rows
    each = len(rows) // len(bytes_L)
    layers = []
    for index in range(len(bytes_L)):
        cuts = []
        for row in rows[index * each : (index + 1) * each]:
            kld, budget = row.summary.kld_windows, row.setting.routing.for_layer(index).scalar_budget
            cuts.append(LayerCut(budget=budget, kld=kld.value, kld_error=kld.error, kept=int(row.costs.kept_L[index])))
        distinct = int(rows[0].base_costs.kept_L[index])
        layers.append(
            LayerSensitivity(layer=config.moe_layers[index], expert_bytes=int(bytes_L[index]), distinct=distinct, cuts=tuple(cuts))
        )
    plan, first = measured.plan, rows[0]
    return Sensitivity(
        model=model,
        shape=plan.shape,
        rule=rule_of(routing),
        backend=backend,
        precision=precision,
        text=tuple(text),
        window=plan.windows.shape[1] - 1,
        windows=len(plan.windows),
        tokens=first.summary.tokens,
        steps=first.base_costs.steps,
        layers=tuple(layers),
    )


# ---- choosing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A list of budgets and what it should cost.

    Attributes:
        budgets: one per MoE layer; 0 is off.
        nbytes: expert bytes of all steps of the measurement.
        share: the same against no cut.
        kld: sum over the layers, nats.
    """

    budgets: tuple[int, ...]
    nbytes: int
    share: float
    kld: float


def frontier(sensitivity: Sensitivity) -> list[Chosen]:
    """Every list for which no other has as few bytes and less KLD, by ascending bytes.

    It is taken that layers add up: that the KLD of a list is the sum of those of its layers cut alone, and that a layer keeps as many
    experts whatever the others do. Of lists that are equal in both the one remains whose first layers have fewer bytes. It does not
    depend on any share, so that the best KLD within one never rises with it.

    Beyond `MOST_POINTS`, which layers of equal experts do not reach in decoding, one point remains of every 2^16th of the bytes: the
    one with the least KLD.
    """
    total = sensitivity.base_bytes
    nbytes, kld = np.zeros(1, np.int64), np.zeros(1)
    budgets: npt.NDArray[np.int64] = np.zeros((1, 0), np.int64)
    for layer in sensitivity.layers:
        options = [(0, layer.distinct, 0.0), *((cut.budget, cut.kept, cut.kld) for cut in layer.cuts)]
        values, kept, losses = (np.array(column) for column in zip(*options, strict=True))
        next_bytes = (nbytes[:, None] + kept * layer.expert_bytes).ravel()
        next_kld = (kld[:, None] + losses).ravel()
        order = np.lexsort((next_kld, next_bytes))  # stable, so that of equal points the first formed comes first
        least = np.minimum.accumulate(next_kld[order])
        order = order[np.concatenate([[True], least[1:] < least[:-1]])]
        if order.size > MOST_POINTS:
            bucket = next_bytes[order] // (total // MOST_POINTS + 1)
            order = order[np.concatenate([[True], bucket[2:] != bucket[1:-1], [True]])]
        before, option = np.divmod(order, len(options))
        nbytes, kld = next_bytes[order], next_kld[order]
        budgets = np.concatenate([budgets[before], values[option, None]], axis=1)
    return [
        Chosen(tuple(int(n) for n in row), int(size), int(size) / total, float(loss))
        for row, size, loss in zip(budgets, nbytes, kld, strict=True)
    ]


def best(sensitivity: Sensitivity, share: float) -> Chosen:
    """The list with the least KLD among those that need at most this share of the expert bytes.

    Args:
        share: above 0, at most 1; taken as the decimal number that it is written as.

    Raises:
        OptionError: it is none, or there is no list of so few bytes.
    """
    if not 0.0 < share <= 1.0:
        raise OptionError("not a share", where="share", expected="above 0, at most 1", got=share)
    limit = math.floor(Fraction(repr(float(share))) * sensitivity.base_bytes)
    points = frontier(sensitivity)
    within = [point for point in points if point.nbytes <= limit]
    if not within:
        least = f"{math.ceil(points[0].share * 1000) / 1000:g} or more with the budgets that were measured"
        raise OptionError("no list of budgets reads so little", where="share", expected=least, got=f"{share:g}")
    return within[-1]


def choose(sensitivity: Sensitivity, share: float) -> tuple[int, ...]:
    """One budget per MoE layer, 0 where a layer stays whole: `best`'s."""
    return best(sensitivity, share).budgets


def _check_counts(of: Any, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(of, name)
        if type(value) is not int or value < smallest:
            raise ProfileFileError("not a count", where=name, expected=f"{smallest} or more", got=repr(value))
