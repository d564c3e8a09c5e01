"""What the README promises names its proof: every test, benchmark or log that stands there exists, and no claim stands without one."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROOF = re.compile(r"(?:tests|benchmarks)/[\w./-]*\w/?(?:::\w+)?|docs/log\.md(?:#[\w-]+)?")
TABLE, PROMISES = "Compared with", "What you can rely on"


def section(text: str, heading: str) -> str:
    """What stands under a heading that begins so, up to the next one of its level or above; empty where there is none."""
    start = re.search(rf"^(#+) {re.escape(heading)}.*$", text, re.MULTILINE)
    if start is None:
        return ""
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def claims(text: str) -> list[str]:
    """Rows of the table of comparison below its head, and promises with the lines they go on in."""
    rows = [line for line in section(text, TABLE).splitlines() if line.startswith("|")][2:]
    promises: list[str] = []
    inside = False
    for line in section(text, PROMISES).splitlines():
        if line.startswith("- "):
            promises.append(line)
        elif inside and line.startswith("  "):
            promises[-1] += line
        inside = line.startswith(("- ", "  ")) and bool(promises)
    return rows + promises


def proofs(text: str) -> list[str]:
    """What is named as a proof, in backticks or as the target of a link."""
    marked = re.findall(r"`([^`]+)`|\]\(([^)\s]+)\)", text)
    return [proof[0] for one, other in marked if (proof := PROOF.match(one or other))]


def is_there(proof: str) -> bool:
    file, _, name = proof.partition("::")
    file, _, anchor = file.partition("#")
    path = ROOT / file
    if not path.exists():
        return False
    if anchor:
        titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    return not name or name in names_of(path)


def names_of(path: Path) -> set[str]:
    """The tests of a file: pytest imports it by this name too, so among all tests this costs nothing."""
    sys.path.insert(0, str(path.parent))
    try:
        return {name for name in vars(importlib.import_module(path.stem)) if name.startswith("test_")}
    finally:
        sys.path.remove(str(path.parent))


def unproven(text: str) -> list[str]:
    """The claims of a text that name no proof, and the proofs that are not there."""
    bare = [f"no proof: {claim}" for claim in claims(text) if not proofs(claim)]
    return bare + [f"not there: {proof}" for proof in proofs(text) if not is_there(proof)]


def test_every_claim_of_the_readme_names_a_proof_that_is_there() -> None:
    assert len(claims(README)) > 10
    assert not unproven(README), "\n".join(unproven(README))


def test_every_proof_the_readme_names_is_there() -> None:
    assert not [proof for proof in proofs(README) if not is_there(proof)]


SAMPLE = """
# Thing
## Compared with what people use now
Words, and `tests/test_cli.py`.

| | this | that |
|---|---|---|
| fast | yes ([duel](benchmarks/README.md)) | no |
| small | yes | `--flags` only |

## What you can rely on
Words:

- One thing, which goes on
  in a second line (`tests/docs/test_readme_claims.py::test_what_names_no_proof_or_a_wrong_one_is_found`).
- Another thing.
- A third ([log](docs/log.md)) and a fourth `tests/nowhere.py` `tests/test_cli.py::test_that_nobody_wrote` `docs/log.md#no-such-heading`.

### And of a part

- A fifth.

## More
- Not a promise.
"""


def test_what_names_no_proof_or_a_wrong_one_is_found() -> None:
    assert len(claims(SAMPLE)) == 6
    assert unproven(SAMPLE) == [
        "no proof: | small | yes | `--flags` only |",
        "no proof: - Another thing.",
        "no proof: - A fifth.",
        "not there: tests/nowhere.py",
        "not there: tests/test_cli.py::test_that_nobody_wrote",
        "not there: docs/log.md#no-such-heading",
    ]
