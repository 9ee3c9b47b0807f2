"""The records of validation/records/window/: what reports of `colibri-jax quality` say, one question a file.

    sh validation/quality/curves.sh OUT && python validation/quality/answers.py OUT

OUT holds the reports. The figures of all of them become data.csv; every record has its command, a table, a plot and two sentences.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from colibri_jax.plots import Panel, draw

RECORDS = Path(__file__).parents[1] / "records" / "window"
COLUMNS = (
    "name", "group", "tokens", "bytes_share", "kld", "kld_error", "kld_p99", "same_top", "ppl_ratio", "ppl_error", "mass", "kept", "union",
    "emptied", "layers_kept", "layers_mass", "layers_emptied",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting's figures in one group of tokens, by the names of COLUMNS; layers are lists."""

    report: str
    values: dict[str, Any]
    routing: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def has(self, policy: str, denominator: str | None = None, vote: str = "weights") -> bool:
        """Whether it ran with these options."""
        same = (self.routing["policy"], self.routing["vote"]) == (policy, vote)
        return same and denominator in (None, self.routing["denominator"]) and not self.name.endswith(" off")


def read_rows(directory: Path) -> list[Row]:
    """Rows of all reports, by their files' names."""
    rows = []
    for file in sorted(directory.glob("*.json")):
        report = json.loads(file.read_text(encoding="utf8"))
        if not report["passed"]:
            raise click.ClickException(f"{file}: the model did not agree with itself")
        for row in report["rows"]:
            q, cost = row["quality"], row["cost"]
            values = {
                "name": row["name"],
                "group": row["group"],
                "tokens": q["tokens"],
                "bytes_share": cost["expert_bytes_share"],
                "kld": q["kld"]["value"],
                "kld_error": q["kld_windows"]["error"],
                "kld_p99": q["kld_percentiles"]["99"],
                "same_top": q["same_top"]["value"],
                "ppl_ratio": q["ppl_ratio"]["value"],
                "ppl_error": q["ppl_ratio"]["error"],
                "mass": cost["mass_kept"],
                "kept": cost["distinct_kept"],
                "union": cost["distinct_before"],
                "emptied": cost["emptied_positions"],
                "layers_kept": cost["layers"]["distinct_kept"],
                "layers_mass": cost["layers"]["mass_kept"],
                "layers_emptied": cost["layers"]["emptied_positions"],
            }
            rows.append(Row(file.stem, values, row["routing"]))
    return rows


def write_data(rows: Sequence[Row], file: Path) -> None:
    """All figures."""
    with file.open("w", encoding="utf8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_cell(row.values[name]) for name in COLUMNS])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- questions ------------------------------------------------------------------------------------------------------

Line = tuple[str, list[Row]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One record.

    Attributes:
        slug: name of its files.
        question: its title.
        reports: names in curves.sh.
        lines: rows by the names of the plot's lines; the table has them one after the other.
        says: two sentences.
        x: what the plot's axis shows of a row.
        extra: more of the record, below the table.
    """

    slug: str
    question: str
    reports: tuple[str, ...]
    lines: list[Line]
    says: str
    x: tuple[str, Callable[[Row], float]] = ("share of expert bytes", lambda row: row.bytes_share)
    extra: str = ""

    def write(self, directory: Path) -> None:
        """The record and its plot."""
        x_label, x = self.x
        own = {name: [x(row) for row in rows] for name, rows in self.lines}
        panels = [
            Panel(x_label, "mean KLD, nats", [], {name: [row.kld for row in rows] for name, rows in self.lines}, own, log_y=True),
            Panel(x_label, "same top token", [], {name: [row.same_top for row in rows] for name, rows in self.lines}, own),
        ]
        draw(directory / f"{self.slug}.svg", self.question, panels)
        text = [
            f"# {self.question}",
            "",
            self.says,
            "",
            f"`sh validation/quality/curves.sh OUT {' '.join(self.reports)}`, then `python validation/quality/answers.py OUT`; held-out "
            "text, shipped model, native engine. Errors of KLD are those of independent windows, of PPL those of independent tokens.",
            "",
            *TABLE_HEAD,
            *(_table_row(row) for row in _once(row for _, rows in self.lines for row in rows)),
            "",
            *([self.extra, ""] if self.extra else []),
            f"![KLD and same top token]({self.slug}.svg)",
            "",
        ]
        (directory / f"{self.slug}.md").write_text("\n".join(text), encoding="utf8")


def _once(rows: Iterable[Row]) -> list[Row]:
    return list({(row.name, row.group): row for row in rows}.values())


def _table_row(row: Row) -> str:
    name = row.name if row.group in ("decoded", "verified") else f"{row.name} ({row.group})"
    return (
        f"| {name} | {row.bytes_share:.1%} | {row.kept:.2f} of {row.union:.2f} | {row.mass:.3f} | {row.kld:.4f} ± {row.kld_error:.4f} | "
        f"{row.kld_p99:.2f} | {row.same_top:.1%} | {row.ppl_ratio:.4f} ± {row.ppl_error:.4f} | {row.emptied} |"
    )


def answers(rows: Sequence[Row]) -> list[Answer]:
    """All records that the reports at hand have the rows for."""

    def of(report: str, policy: str, denominator: str | None = None, vote: str = "weights", group: str | None = None) -> list[Row]:
        found = [r for r in rows if r.report == report and r.has(policy, denominator, vote) and group in (None, r.group)]
        return sorted(found, key=lambda row: -row.bytes_share)

    def at(lines: Sequence[Row], budget: int) -> Row:
        return next(row for row in lines if row.routing["budget"] == budget)

    decode = {d: of("decode", "aggregate", d) for d in ("survivors", "frozen")}
    cover = {d: of("decode_coverage", "coverage", d) for d in ("survivors", "frozen")}
    verify = {(p, d): of("verify", p, d) for p in ("aggregate", "floor", "substitute") for d in ("survivors", "frozen")}
    per = {d: of("verify_per", "per_position", d) for d in ("survivors", "frozen")}
    vcover = {d: of("verify_coverage", "coverage", d) for d in ("survivors", "frozen")}
    votes = {(p, d): of("verify_votes", p, d, "all_scores") for p in ("aggregate", "substitute") for d in ("survivors", "frozen")}
    prefill = {(p, d): of("prefill", p, d) for p in ("aggregate", "floor", "substitute") for d in ("survivors", "frozen")}

    four, six = at(decode["survivors"], 4), at(decode["survivors"], 6)
    aggregate, substitute = {d: verify["aggregate", d] for d in decode}, {d: verify["substitute", d] for d in decode}
    found = [
        Answer(
            "mass",
            "What the top 4 and top 6 of 8 hold of a trained sigmoid router's mass",
            ("decode",),
            [("aggregate frozen", decode["frozen"]), ("aggregate survivors", decode["survivors"])],
            f"A position's best 6 of 8 experts hold {six.mass:.1%} of its router mass and its best 4 hold {four.mass:.1%}, where the "
            "proposal guessed over 90 % and 80 to 85 %. The gates are flat in every layer, so that no cut of two experts is free: it "
            f"costs a KLD of {at(decode['frozen'], 6).kld:.3f} at best.",
            ("mass kept", lambda row: row.mass),
            _mass_by_layer(decode["frozen"]),
        ),
        Answer(
            "denominator",
            "Survivors against frozen denominators",
            ("decode", "decode_coverage", "verify"),
            [
                *((f"decode aggregate {d}", decode[d]) for d in decode),
                *((f"decode coverage {d}", cover[d]) for d in cover),
                *((f"verify aggregate {d}", aggregate[d]) for d in decode),
            ],
            "A frozen denominator has the smaller KLD at every budget, policy and kind of step measured: at 4 of 8 in decoding "
            f"{at(decode['frozen'], 4).kld:.3f} against {four.kld:.3f}. Scaling what is left up to full weight makes the remaining "
            "experts say more than they would have, and an answer with less of the routed sum is nearer to the truth than a wrong sum.",
        ),
        Answer(
            "substitution",
            "Truncation against substitution in verification",
            ("verify",),
            [(f"{p} {d}", verify[p, d]) for p in ("aggregate", "floor", "substitute") for d in ("frozen", "survivors")],
            "With survivors' denominators substitution is better up to 20 experts "
            f"({at(substitute['survivors'], 12).kld:.3f} against {at(aggregate['survivors'], 12).kld:.3f} at 12); with frozen ones it "
            "helps below 12, where truncation empties positions "
            f"({at(substitute['frozen'], 6).kld:.3f} against {at(aggregate['frozen'], 6).kld:.3f} at 6), and costs a little above "
            f"({at(substitute['frozen'], 16).kld:.4f} against {at(aggregate['frozen'], 16).kld:.4f} at 16). "
            "What substitution repairs is mostly a sum that was scaled up: where the rest keeps its weights, a newcomer stands in for a "
            "lost expert no better than nothing does.",
        ),
        Answer(
            "union",
            "A union's budget against one per position, for verification",
            ("verify", "verify_per", "verify_coverage"),
            [("aggregate frozen", aggregate["frozen"]), ("per_position frozen", per["frozen"]), ("coverage frozen", vcover["frozen"])],
            "Above a third of the expert bytes a union's budget is better than one per position: 16 of a union of 21 have a KLD of "
            f"{at(aggregate['frozen'], 16).kld:.4f} at {at(aggregate['frozen'], 16).bytes_share:.0%} of the bytes, 6 of 8 for each "
            f"position {at(per['frozen'], 6).kld:.4f} at {at(per['frozen'], 6).bytes_share:.0%}. Per position the result does not depend "
            "on who shares the step, and coverage, which sizes each union by its votes, is the best of the three.",
        ),
        Answer(
            "votes",
            "Votes of weights against votes of all scores",
            ("verify", "verify_votes"),
            [
                *((f"{p} {d} weights", verify[p, d]) for p, d in votes),
                *((f"{p} {d} all_scores", votes[p, d]) for p, d in votes),
            ],
            "Votes by final weights have the smaller KLD at every budget, policy and denominator measured (aggregate frozen at 12: "
            f"{at(aggregate['frozen'], 12).kld:.3f} against {at(votes['aggregate', 'frozen'], 12).kld:.3f}), and all scores empty more "
            f"positions ({at(votes['aggregate', 'frozen'], 12).emptied} against {at(aggregate['frozen'], 12).emptied}). A position's "
            "eight experts hold only a part of a sigmoid router's scores, and the rest of such a vote goes to experts nobody uses.",
        ),
        Answer(
            "prefill",
            "Which prefill budgets are harmless, and what they save",
            ("prefill", "prefill_per", "prefill_coverage"),
            [
                *((f"{p} frozen", prefill[p, "frozen"]) for p in ("aggregate", "floor", "substitute")),
                ("per_position frozen", of("prefill_per", "per_position", "frozen")),
                ("coverage frozen", of("prefill_coverage", "coverage", "frozen")),
            ],
            f"In chunks of 64 positions a layer uses {prefill['aggregate', 'frozen'][0].union:.0f} of 64 experts, and only budgets near "
            f"that are harmless: 56 has a KLD of {at(prefill['aggregate', 'frozen'], 56).kld:.4f} and saves "
            f"{1 - at(prefill['aggregate', 'frozen'], 56).bytes_share:.0%} of the expert bytes, 48 has "
            f"{at(prefill['aggregate', 'frozen'], 48).kld:.3f} and saves {1 - at(prefill['aggregate', 'frozen'], 48).bytes_share:.0%}. "
            "A longer chunk needs nearly all experts whatever it holds and reads few bytes per token, so that a prefill budget saves "
            "least where it costs most.",
        ),
    ]
    found += _answers_about_layers([row for row in rows if row.report == "layers" and row.has("aggregate", "frozen")])
    return [answer for answer in found if all(rows for _, rows in answer.lines)]


def _answers_about_layers(rows: Sequence[Row]) -> list[Answer]:
    """Cuts of single layers, and lists of budgets against one budget."""
    if not rows:
        return []
    by_budget = {tuple(b) if isinstance(b := row.routing["budget"], list) else b: row for row in rows}
    layers = len(rows[0].layers_mass)

    def alone(layer: int, n: int) -> Row:
        return by_budget[tuple(n if i == layer else 0 for i in range(layers))]

    others = [alone(layer, 5).kld for layer in range(1, layers)]
    first, mirrored = by_budget[6, 5, 5, 5, 5], by_budget[5, 5, 5, 5, 6]
    five, six = by_budget[5], by_budget[6]
    between = five.kld**0.8 * six.kld**0.2
    return [
        Answer(
            "early_layers",
            "Whether an early layer's error costs more",
            ("layers",),
            [(f"MoE layer {layer} alone", [alone(layer, n) for n in (7, 6, 5, 4, 3)]) for layer in range(layers)],
            f"The first MoE layer's does: cut to 5 of 8 by itself it has a KLD of {alone(0, 5).kld:.4f}, the others "
            f"{min(others):.4f} to {max(others):.4f}. The later ones are alike, and the last one's error, which nothing comes after to "
            f"mend, costs the most perplexity (× {alone(layers - 1, 5).ppl_ratio:.4f} against {alone(0, 5).ppl_ratio:.4f} for the first).",
            ("experts kept in that layer", lambda row: min(row.layers_kept)),
        ),
        Answer(
            "profile",
            "One budget for all layers against a list of budgets",
            ("layers",),
            [
                ("one budget", [six, five]),
                ("first layer spared", [by_budget[7, 6, 6, 6, 6], first]),
                ("last layer spared", [by_budget[6, 6, 6, 6, 7], mirrored]),
            ],
            f"With one expert more in the most sensitive layer, 6:5:5:5:5 has a KLD of {first.kld:.4f} at {first.bytes_share:.0%} of "
            f"the bytes and the mirrored list {mirrored.kld:.4f}, while one budget, read off between 5 and 6, would have {between:.4f}. On "
            "this model a profile gains next to nothing: its layers differ too little.",
        ),
    ]


def _mass_by_layer(rows: Sequence[Row]) -> str:
    layers = len(rows[0].layers_mass)
    head = "| experts of 8 | " + " | ".join(f"mass, MoE layer {i}" for i in range(layers)) + " |"
    body = [f"| {row.routing['budget']} | " + " | ".join(f"{mass:.3f}" for mass in row.layers_mass) + " |" for row in rows]
    return "\n".join([head, "|---" * (1 + layers) + "|", *body])


TITLES = {
    "decode": "Decoding",
    "verify": "Verification of 4 rows",
    "prefill": "Prefill in chunks of 64",
    "damage": "Prompts that were cut",
    "layers": "Cuts by layer",
    "cached": "Policies that look at the cache",
    "swapped": "Exchange for cached experts",
}
TABLE_HEAD = ("| setting | bytes | experts | mass | KLD | p99 | same top | PPL × | emptied |", "|---|---|---|---|---|---|---|---|---|")


def write_curves(rows: Sequence[Row], directory: Path) -> None:
    """Every row of every report, for those who look for one."""
    text = ["# All curves", "", "`python validation/quality/answers.py OUT`; figures of all settings that `curves.sh` measures.", ""]
    for prefix, title in TITLES.items():
        some = _once(row for row in rows if row.report.startswith(prefix))
        if some:
            text += [f"## {title}, {some[0].tokens:,} tokens", "", *TABLE_HEAD, *map(_table_row, some), ""]
    (directory / "curves.md").write_text("\n".join(text), encoding="utf8")


@click.command()
@click.argument("reports", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RECORDS, help="Where the records go.")
def main(*, reports: Path, out: Path) -> None:
    """Write the records from the reports in REPORTS."""
    rows = read_rows(reports)
    out.mkdir(parents=True, exist_ok=True)
    write_data(rows, out / "data.csv")
    write_curves(rows, out)
    for answer in answers(rows):
        answer.write(out)
        click.echo(f"{answer.slug}: {answer.says}")


if __name__ == "__main__":
    main()
