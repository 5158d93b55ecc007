"""Writes docs/mutations.md from the results and from what was judged of those that survived."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant
from tests.mutation.trial import ROOT, read_results

PAGE = ROOT / "docs" / "mutations.md"
BEFORE = Path(__file__).with_name("results_before.jsonl")
RESULTS = Path(__file__).with_name("results.jsonl")
OF_A_READER = Path(__file__).with_name("results_by_hand.jsonl")
OF_A_SECOND_READER = Path(__file__).with_name("results_second_reader.jsonl")
JUDGED = Path(__file__).with_name("judged.json")
VERDICTS = ("equivalent", "accepted", "test added", "open")
BEGIN, END = "<!-- tools/mutate.py: begin -->", "<!-- tools/mutate.py: end -->"

Row = Mapping[str, Any]


def name_of(mutant: Mutant) -> str:
    """Return how a judgement names a mutant: by its text, since lines move."""
    return f"{mutant.path}: {mutant.original} -> {mutant.replacement} ({mutant.operator}, line {mutant.line})"


def read_judged(path: Path) -> dict[str, tuple[str, str]]:
    """Return verdict and reason by the name of a mutant."""
    found = {name: (entry["verdict"], entry["why"]) for name, entry in json.loads(path.read_text()).items()}
    for name, (verdict, why) in found.items():
        assert verdict in VERDICTS, f"{name}: {verdict}"
        assert why, name
    return found


def whole_page() -> str:
    """Return the part of docs/mutations.md between its marks."""
    parts = [page(BEFORE, RESULTS, JUDGED), "## Mistakes of a reader", of_a_reader(OF_A_READER, JUDGED)]
    parts += ["## Mistakes of a second reader", of_a_second_reader(OF_A_SECOND_READER, JUDGED)]
    return "\n\n".join(part.strip() for part in parts)


def page(before: Path, after: Path, judged: Path) -> str:
    """Return what became of the mutants, by room and by operator, and what was judged of them."""
    verdicts = read_judged(judged)
    first, last = read_results(before), read_results(after)
    lines = _before_and_now(first, last, verdicts)
    kinds = Counter(mutant.operator for mutant in last)
    missed = Counter(mutant.operator for mutant, row in last.items() if row["outcome"] != "caught")
    lines += ["", "| operator | mutants | not caught now |", "|---|---|---|"]
    lines += [f"| {kind} | {count} | {missed[kind]} |" for kind, count in sorted(kinds.items())]
    lines += ["", *_judgements(first, last, verdicts)]
    return "\n".join(lines)


def of_a_reader(results: Path, judged: Path) -> str:
    """Return what became of the mistakes that a reader has thought of: a table by room, and those that no test catches.

    A row of the results may have `new_test`: the test that caught it was written with this list in hand.
    """
    verdicts, found = read_judged(judged), read_results(results)
    lines = ["| room | planted | caught | by a test written for the list | equivalent | survived | score |"]
    lines.append("|---|---|---|---|---|---|---|")
    for room in [*sorted({room_of(mutant.path) for mutant in found}), "all"]:
        of_room = {m: row for m, row in found.items() if room in (room_of(m.path), "all")}
        caught = {m: row for m, row in of_room.items() if row["outcome"] == "caught"}
        equivalent = sum(_verdict(m, verdicts) == "equivalent" for m in of_room.keys() - caught.keys())
        counted, new = len(of_room) - equivalent, sum(bool(row.get("new_test")) for row in caught.values())
        score = f"{100 * len(caught) / counted:.0f}%" if counted else "-"
        lines.append(
            f"| {room} | {len(of_room)} | {len(caught)} | {new} | {equivalent} | {counted - len(caught)} | {score} |"
        )
    return "\n".join([*lines, "", *_judgements(found, found, verdicts)])


def of_a_second_reader(results: Path, judged: Path) -> str:
    """Return what became of the mistakes of somebody who had not seen the tests, before and after those that were
    written for what survived, which a row's `new_test` tells."""
    verdicts, last = read_judged(judged), read_results(results)
    first = {m: {**row, "outcome": "survived"} if row.get("new_test") else row for m, row in last.items()}
    return "\n".join([*_before_and_now(first, last, verdicts), "", *_judgements(first, last, verdicts)])


def room_of(path: str) -> str:
    """Return the room of a file of the package."""
    parts = Path(path).parts
    return parts[1 if len(parts) > 2 else len(parts) - 1]


def _before_and_now(
    first: Mapping[Mutant, Row], last: Mapping[Mutant, Row], verdicts: Mapping[str, tuple[str, str]]
) -> list[str]:
    """Return a table by room."""
    lines = ["| room | mutants | caught before | caught now | equivalent | survived | score before | score now |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for room in [*sorted({room_of(mutant.path) for mutant in last}), "all"]:
        of_room = {m: row for m, row in last.items() if room in (room_of(m.path), "all")}
        lines.append(_row(room, {m: first.get(m, row) for m, row in of_room.items()}, of_room, verdicts))
    return lines


def _row(room: str, before: Mapping[Mutant, Row], now: Mapping[Mutant, Row], verdicts: Mapping[str, Any]) -> str:
    equivalent = sum(_verdict(mutant, verdicts) == "equivalent" for mutant in now)
    caught_before, caught = _caught(before.values()), _caught(now.values())
    counted = len(now) - equivalent
    survived = counted - caught
    shares = [f"{100 * part / counted:.0f}%" if counted else "-" for part in (caught_before, caught)]
    return (
        f"| {room} | {len(now)} | {caught_before} | {caught} | {equivalent} | {survived} | {shares[0]} | {shares[1]} |"
    )


def _caught(rows: Iterable[Row]) -> int:
    return sum(row["outcome"] == "caught" for row in rows)


def _verdict(mutant: Mutant, verdicts: Mapping[str, tuple[str, str]]) -> str:
    return verdicts.get(name_of(mutant), ("open", ""))[0]


def _judgements(
    first: Mapping[Mutant, Row], last: Mapping[Mutant, Row], verdicts: Mapping[str, tuple[str, str]]
) -> list[str]:
    """List what survived at first, with what became of it."""
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for mutant, row in {**last, **first}.items():
        if row["outcome"] == "caught" and last.get(mutant, row)["outcome"] == "caught":
            continue
        now = last.get(mutant, row)
        verdict, why = verdicts.get(name_of(mutant), ("open", "not looked at yet"))
        if verdict == "open" and now["outcome"] == "caught":
            verdict, why = "test added", now["by"]
        text = f"`{_short(mutant.original)}` → `{_short(mutant.replacement)}`"
        by_verdict[verdict].append(f"- {mutant.path.removeprefix('megatron_ext/')}: {text}: {why}")
    lines = []
    for verdict in VERDICTS:
        if by_verdict[verdict]:
            lines += [f"### {verdict.capitalize()}", "", *sorted(by_verdict[verdict]), ""]
    return lines


def _short(text: str) -> str:
    one = " ".join(text.split()).replace("|", "\\|")
    return one if len(one) <= 70 else f"{one[:67]}..."
