"""`budget_profile.json` beside a container: the sensitivity of its layers, one profile for each kind of steps and rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colibri_jax.errors import ColibriError, MissingProfileError, ProfileFileError, ProfileModelError
from colibri_jax.files import write_whole
from colibri_jax.quality.profile import Sensitivity, describe_key, rule_of, steps_key
from colibri_jax.quality.steps import StepShape
from colibri_jax.routing_spec import RoutingOptions

PROFILE_FILE = "budget_profile.json"
FORMAT = "colibri_jax budget profile 1"


def read_profiles(path: Path, model: str) -> tuple[Sensitivity, ...]:
    """All profiles of a file in the order in which they were measured; none where there is no file.

    Args:
        model: `container_fingerprint` of the container that they shall be of.

    Raises:
        ProfileModelError: they are of another one.
        ProfileFileError: the file is not what this package writes.
    """
    try:
        raw: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileFileError("budget profiles cannot be read", where=str(path), expected="JSON", got=error) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("profiles"), list):
        raise ProfileFileError("not a file of budget profiles", where=str(path), expected=f'"format": "{FORMAT}"', got="another")
    try:
        found = tuple(Sensitivity.from_json(one) for one in raw["profiles"])
    except ColibriError as error:
        raise ProfileFileError("not a budget profile", where=str(path), expected="one that this wrote", got=error) from error
    for profile in found:
        if profile.model != model:
            raise ProfileModelError("budget profile of another model", where=str(path), expected=model, got=profile.model)
    return found


def write_profile(path: Path, profile: Sensitivity) -> None:
    """Add a profile to a file, in the place of one of the same steps and rule: a whole file, or the old one.

    Raises:
        ProfileFileError: as `read_profiles`; the file stays as it is.
    """
    others = [other for other in read_profiles(path, profile.model) if other.key != profile.key]
    raw = {"format": FORMAT, "profiles": [one.to_json() for one in (*others, profile)]}
    write_whole(path, json.dumps(raw, indent=1, allow_nan=False) + "\n")


def find_profile(path: Path, model: str, shape: StepShape, routing: RoutingOptions | None) -> Sensitivity:
    """The profile of steps and a rule.

    Args:
        model: as in `read_profiles`.
        shape: the steps; context and window may be others than those of the measurement.
        routing: whose rule it has to be of; None takes the last one that was measured.

    Raises:
        MissingProfileError: there is none; it says which command makes one.
        ProfileFileError, ProfileModelError: as `read_profiles`.
    """
    profiles = read_profiles(path, model)
    for profile in reversed(profiles):
        if steps_key(profile.shape) == steps_key(shape) and (routing is None or profile.rule == rule_of(routing)):
            return profile
    wanted = describe_key(shape, routing or RoutingOptions())
    there = ", ".join(profile.describe() for profile in profiles) or "none"
    raise MissingProfileError(
        f"no budget profile for {wanted}", where=str(path), expected=f"the result of: {command(path, shape, routing)}", got=there
    )


def command(path: Path, shape: StepShape, routing: RoutingOptions | None) -> str:
    """What one types to measure a profile."""
    rule = routing or RoutingOptions()
    flags = {
        "--scopes": (shape.kind, ""),
        "--rows": (shape.rows if shape.kind == "verify" else "", ""),
        "--chunk": (shape.chunk if shape.kind == "prefill" else "", ""),
        "--policies": (rule.policy, ""),
        "--denominators": (rule.denominator, ""),
        "--votes": (rule.vote, "weights"),
        "--floor": (rule.floor, 1),
    }
    words = [f"{flag} {value}" for flag, (value, default) in flags.items() if value not in ("", default)]
    return f"colibri-jax quality MODEL_DIR --text FILE --sensitivity {path} {' '.join(words)} --budgets N,N,…"
