"""Simulated cache policies against the engine's store, slow second texts and every possible content; and faults that must be noticed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import cache_policies as cp
import cache_simulation as cs
import numpy as np
import pytest
from cache_traces import Drawn, Trace
from click.testing import CliRunner
from expert_files import ExpertFiles, write_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cache_policies as slow

from colibri_jax import _native
from colibri_jax.engine.options import EngineOptions
from colibri_jax.quant import WeightFormat

LAYERS, EXPERTS = 2, 10


def random_steps(seed: int, steps: int, layers: int = LAYERS, experts: int = EXPERTS) -> list[list[list[int]]]:
    """Popular experts and sizes that differ, so that every branch of a policy is taken."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, experts + 1)
    weights /= weights.sum()
    return [
        [sorted(rng.choice(experts, rng.integers(0, 5), replace=False, p=weights).tolist()) for _ in range(layers)] for _ in range(steps)
    ]


def step_strategy(layers: int, experts: int, most: int) -> st.SearchStrategy[list[list[list[int]]]]:
    chosen = st.sets(st.integers(0, experts - 1), max_size=3).map(sorted)
    return st.lists(st.lists(chosen, min_size=layers, max_size=layers), min_size=1, max_size=most)


def hits_by_step(policy: Callable[[int, int, int], cs.Cache], steps: Sequence[Sequence[int]], slots: int, experts: int) -> list[int]:
    """Hits of each step of one layer. What is in memory must fit, and come from before or from the step."""
    cache = policy(slots, 1, experts)
    hits = []
    before: set[int] = set()
    for keys in steps:
        hits.append(cache.walk(0, keys))
        after = set(cache.residents())
        assert len(cache.residents()) == len(after) <= slots
        assert after <= before | set(keys)
        assert hits[-1] == len(before & set(keys))
        before = after
    return hits


# ---- the engine's policies -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    fmt = WeightFormat(4, 64, "rows16")
    return write_experts(tmp_path_factory.mktemp("experts"), fmt, layers=LAYERS, experts=EXPERTS, hidden=32, width=32)


ENGINES: dict[str, type[cs.LRU]] = {"lru": cs.LRU, "step_lfu": cs.decayed(0, 5)}


def agrees_with_the_store(policy: type[cs.LRU], engines: str, files: ExpertFiles, slots: int, steps: list[list[list[int]]]) -> bool:
    """Every hand-out hits or misses in both, and after every walk both would give up the same experts in the same order."""
    store = _native.ExpertStore(files.files, files.index, cache_experts=slots, cache_policy=engines)
    caches = [policy(slots, 1, EXPERTS) for _ in range(LAYERS)]
    for step in steps:
        for layer, experts in enumerate(step):
            held = set(caches[layer].residents())
            walk = store.walk(layer, experts)
            for expert in experts:
                before = store.counters()["hits"]
                walk.next().release()
                if store.counters()["hits"] - before != (expert in held):
                    return False
            walk.close()
            caches[layer].walk(0, experts)
            if store.by_rank(layer) != caches[layer].by_rank():
                return False
    return True


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5, EXPERTS])
def test_both_policies_are_the_engines_hit_for_hit(files: ExpertFiles, slots: int, engines: str) -> None:
    for seed in range(3):
        assert agrees_with_the_store(ENGINES[engines], engines, files, slots, random_steps(10 * seed + slots, 150))


def test_the_engines_default_is_the_studys() -> None:
    assert EngineOptions().cache_policy == "step_lfu"
    assert getattr(cs.POLICIES[cs.DEFAULT], "shifts", None) == (0, 5)


class HitsDoNotMove(cs.LRU):
    def hit(self, key: int) -> None:
        pass


class PromisesAreBroken(cs.LRU):
    def victim(self, promised: Collection[int]) -> int | None:
        return super().victim(())


class NewestGoes(cs.LRU):
    def victim(self, promised: Collection[int]) -> int | None:
        return next((key for key in reversed(self.order) if key not in promised), None)


class NoStepIsNewest(cs.decayed(5)):  # type: ignore[misc]
    pass


class AnotherHalfLife(cs.decayed(0, 6)):  # type: ignore[misc]
    pass


class EmptyWalksAreNoSteps(cs.decayed(0, 5)):  # type: ignore[misc]
    def walk(self, layer: int, keys: Sequence[int]) -> int:
        return super().walk(layer, keys) if keys else 0


class NothingIsForgotten(cs.decayed(0, 5)):  # type: ignore[misc]
    def tick(self, layer: int) -> None:
        self.means[layer, 0] = 0
        self.scores = self.means[layer].sum(axis=0).tolist()


class OthersAlwaysEnter(cs.decayed(0, 5)):  # type: ignore[misc]
    def admits(self, key: int, victim: int) -> bool:
        return True


class MostRecentEqualGoes(cs.decayed(0, 5)):  # type: ignore[misc]
    def by_rank(self) -> list[int]:
        return sorted(reversed(self.order), key=self.scores.__getitem__)

    def victim(self, promised: Collection[int]) -> int | None:
        return next((key for key in self.by_rank() if key not in promised), None)


STEP_LFU_FAULTS = (NoStepIsNewest, AnotherHalfLife, EmptyWalksAreNoSteps, NothingIsForgotten, OthersAlwaysEnter, MostRecentEqualGoes)


@pytest.mark.parametrize(
    ("policy", "engines"),
    [
        *((policy, "lru") for policy in (HitsDoNotMove, PromisesAreBroken, NewestGoes)),
        *((policy, "step_lfu") for policy in STEP_LFU_FAULTS),
        (ENGINES["lru"], "step_lfu"),
        (ENGINES["step_lfu"], "lru"),
    ],
)
def test_a_fault_in_a_policy_of_the_engine_is_noticed_by_the_store(policy: type[cs.LRU], engines: str, files: ExpertFiles) -> None:
    with contextlib.suppress(KeyError):  # the broken promise itself
        assert not agrees_with_the_store(policy, engines, files, 3, random_steps(3, 150))


# ---- the other policies are what they say --------------------------------------------------------------------------

SLOW: dict[str, tuple[type[cs.Cache], Callable[[Sequence[Sequence[int]], int], list[int]]]] = {
    "SLRU": (cs.SLRU, slow.slru),
    "S3-FIFO": (cs.S3FIFO, slow.s3fifo),
    **{
        f"LFU {shifts}": (cs.decayed(*shifts), lambda steps, slots, shifts=shifts: slow.lfu(steps, slots, shifts))
        for shifts in ((), (1,), (3,), (0, 3))
    },
}


def differs(policy: type[cs.Cache], second: Callable[[Sequence[Sequence[int]], int], list[int]]) -> bool:
    """Whether the two count other hits in any step of any of some traces, or the policy contradicts itself."""
    for seed in range(6):
        steps = [step[0] for step in random_steps(seed, 60, layers=1)]
        for slots in (1, 2, 4, 6):
            try:
                if hits_by_step(policy, steps, slots, EXPERTS) != second(steps, slots):
                    return True
            except (AssertionError, KeyError):
                return True
    return False


@pytest.mark.parametrize("name", SLOW)
def test_policies_are_their_second_texts(name: str) -> None:
    assert not differs(*SLOW[name])


def test_every_policy_of_the_study_has_a_second_text() -> None:
    texts = {policy for policy, _ in SLOW.values()} | {cs.LRU}
    assert {cs.LRU, cs.SLRU, cs.S3FIFO} <= set(cs.POLICIES.values())
    assert all(policy in texts or issubclass(policy, cs.DecayedLFU) for policy in cs.POLICIES.values())


class HitsAreNotPromoted(cs.SLRU):
    def hit(self, key: int) -> None:
        (self.protected if key in self.protected else self.probation).move_to_end(key)


class OverflowIsLost(cs.SLRU):
    def hit(self, key: int) -> None:
        super().hit(key)
        while len(self.probation) > 1:
            self.probation.popitem(last=False)


class NothingIsRemembered(cs.S3FIFO):
    def miss(self, key: int, promised: Collection[int]) -> None:
        self.left.clear()
        super().miss(key, promised)


class UsesAreNotCounted(cs.S3FIFO):
    def hit(self, key: int) -> None:
        pass


class NoSecondRound(cs.S3FIFO):
    def evict_main(self, promised: Collection[int]) -> bool:
        victim = next((key for key in self.main if key not in promised), None)
        return victim is not None and self.main.pop(victim) >= 0


class NothingDecays(cs.decayed(3)):  # type: ignore[misc]
    def tick(self, layer: int) -> None:
        self.scores = self.means[layer].sum(axis=0).tolist()


class AllEnter(cs.decayed(0, 3)):  # type: ignore[misc]
    def admits(self, key: int, victim: int) -> bool:
        return True


class MissesAreNotCounted(cs.decayed(3)):  # type: ignore[misc]
    def miss(self, key: int, promised: Collection[int]) -> None:
        cs.LRU.miss(self, key, promised)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (HitsAreNotPromoted, "SLRU"),
        (OverflowIsLost, "SLRU"),
        (NothingIsRemembered, "S3-FIFO"),
        (UsesAreNotCounted, "S3-FIFO"),
        (NoSecondRound, "S3-FIFO"),
        (NothingDecays, "LFU (3,)"),
        (AllEnter, "LFU (0, 3)"),
        (MissesAreNotCounted, "LFU (3,)"),
    ],
)
def test_a_fault_in_a_policy_is_noticed(policy: type[cs.Cache], name: str) -> None:
    assert differs(policy, SLOW[name][1])


# ---- the optimum ---------------------------------------------------------------------------------------------------


def moments(steps: list[list[list[int]]], experts: int) -> list[tuple[int, list[int]]]:
    return [(at, keys) for at, _, keys in cs.walks(steps, experts)]


@settings(max_examples=150)
@given(steps=step_strategy(2, 5, 6), slots=st.integers(1, 3), warmup=st.integers(0, 3))
def test_optimum_is_that_of_every_content_tried(steps: list[list[list[int]]], slots: int, warmup: int) -> None:
    own = sum(slow.most_hits([(at, step[layer]) for at, step in enumerate(steps)], slots, warmup) for layer in range(2))
    assert cs.belady(steps, 5, slots, warmup) == own
    if slots == 1:
        assert cs.belady(steps, 5, 1, warmup, shared=True) == slow.most_hits(moments(steps, 5), 2, warmup)


@settings(max_examples=100)
@given(steps=step_strategy(2, 6, 25), slots=st.integers(1, 6), warmup=st.integers(0, 8), shared=st.booleans())
def test_no_policy_has_more_hits_than_the_optimum(steps: list[list[list[int]]], slots: int, warmup: int, shared: bool) -> None:
    most = cs.belady(steps, 6, slots, warmup, shared=shared)
    for name, policy in cs.POLICIES.items():
        assert cs.simulate(policy, steps, 6, slots, warmup, shared=shared) <= most, name


def test_optimum_ignores_what_only_the_warmup_could_use() -> None:
    # With one slot, keeping 0 gains hits in the warm-up alone, and letting 1 in gains the one that counts.
    steps = [[[1]], [[0]], [[0]], [[0]], [[1]]]
    assert cs.belady(steps, 2, 1, 0) == 2
    assert cs.belady(steps, 2, 1, 4) == 1


def test_optimum_is_told_from_the_next_used_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = random_steps(1, 12, layers=1, experts=5)
    right = slow.most_hits(moments(steps, 5), 2, 0)
    assert cs.belady(steps, 5, 2, 0) == right
    monkeypatch.setattr(cs, "max", min, raising=False)
    assert cs.belady(steps, 5, 2, 0) < right


# ---- traces and the command ----------------------------------------------------------------------------------------


def test_drawn_traces_repeat_and_have_the_properties_they_name() -> None:
    plain, same = (Drawn(0.8).draw(300, layers=2) for _ in range(2))
    assert np.array_equal(plain.used, same.used)
    assert not np.array_equal(plain.used, Drawn(0.8).draw(300, layers=2, seed=1).used)
    assert (np.diff(plain.used, axis=2) > 0).all()
    assert plain.used.min() >= 0
    assert plain.used.max() < plain.experts
    assert Drawn(0.4).draw(300).top_share < plain.top_share < Drawn(1.2).draw(300).top_share
    assert Drawn(0.8, stickiness=0.4).draw(300).repeats > plain.repeats + 0.2
    first, last = (np.bincount(part.ravel(), minlength=256) for part in np.split(Drawn(1.2, drift=1.0).draw(600, layers=1).used, 2))
    still_first, still_last = (np.bincount(part.ravel(), minlength=256) for part in np.split(Drawn(1.2).draw(600, layers=1).used, 2))
    assert np.corrcoef(first, last)[0, 1] < np.corrcoef(still_first, still_last)[0, 1] - 0.2


def run_command(folder: Path, *args: str) -> tuple[int, dict[str, Any]]:
    drawn = Drawn(0.8, stickiness=0.4).draw(60, layers=2, experts=40, top_k=4)
    drawn.save(folder)
    assert np.array_equal(Trace.open(folder / f"{drawn.name}.npz").used, drawn.used)
    result = CliRunner().invoke(cp.main, ["--trace", str(folder / f"{drawn.name}.npz"), "--json", *args])
    return result.exit_code, json.loads(result.stdout)


def test_command_measures_a_saved_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp, "RECORD", tmp_path / "record.md")
    status, answer = run_command(tmp_path, "--record")
    assert status == 0
    (rates,) = answer["hit_percent"].values()
    assert {*cs.POLICIES, cp.OPTIMUM, cp.POOL + "LRU", cp.POOL + answer["best"], cp.POOL + cp.OPTIMUM} == set(rates)
    assert all(low <= high + 1e-9 for low, high in zip(rates["LRU"], rates[cp.OPTIMUM], strict=True))
    text = (tmp_path / "record.md").read_text(encoding="utf8")
    assert f"| **LRU** | {' | '.join(f'{rate:.1f}' for rate in rates['LRU'])} |" in text
    assert "<svg" in (tmp_path / "record.svg").read_text(encoding="utf8")


def test_command_fails_where_a_policy_beats_the_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp, "belady", lambda *args, **kwargs: 1)
    status, answer = run_command(tmp_path)
    assert status == 1
    assert any("more hits than the optimum" in failure for failure in answer["failures"])


def test_positions_taken_together_are_one_step() -> None:
    steps = [[[0], [1]], [[0, 2], [1]], [[1], [3]], [[4], [4]], [[5], [5]]]
    assert cs.grouped(steps, (2, 1)) == ([[[0, 2], [1]], [[1], [3]], [[4, 5], [4, 5]]], [2, 1, 2])
    assert cs.grouped(steps, (3,)) == ([[[0, 1, 2], [1, 3]]], [3])


def test_residents_come_first_in_short_steps_alone() -> None:
    for positions, left in ((1, [1]), (cs.MOST_OUT_OF_ORDER, [1]), (cs.MOST_OUT_OF_ORDER + 1, [2])):
        cache = cs.LRU(1, 1, 3)
        cache.walk(0, [2])
        assert (cache.step(0, [0, 1, 2], positions), list(cache.order)) == (1, left)


def test_steps_of_several_positions_are_measured_past_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    used = np.array([[[step // 8]] for step in range(64)], np.int16)
    study = cp.Study()
    monkeypatch.setattr(cp, "SEVERAL", {"two": ((2,), lambda n: True), "single": ((3, 1), lambda n: n == 1)})
    cp.measure_several(Trace("t", "recorded", 8, used), study)
    # Of 24 pairs past the first quarter the first of each eight steps misses; single steps come last of four and always hit.
    assert study.several == {
        ("t", "two"): {p: [75.0] * 3 for p in ("LRU", cs.DEFAULT)},
        ("t", "single"): dict.fromkeys(("LRU", cs.DEFAULT), [100.0] * 3),
    }
    assert any("+0.0 points from LRU" in line for line in cp.several(study))


def test_rule_for_a_new_default() -> None:
    def study(gain: float, worst: float) -> cp.Study:
        rates = {name: [10.0] * len(cp.SLOTS) for name in cs.POLICIES}
        rates["SLRU"] = [10.0 + worst, 10.0, *[10.0 + gain] * (len(cp.SLOTS) - 2)]
        return cp.Study(rates={"a trace": rates})

    assert study(2.0, -1.0).replaces_lru
    assert not study(1.9, -1.0).replaces_lru
    assert not study(2.0, -1.1).replaces_lru
