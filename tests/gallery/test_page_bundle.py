"""Laws of the bundled script: modules in the order of imports, and the rules for bundling."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from halation.gallery.html_export import PAGE_FOLDER, bundle

APP = 'import { two } from "./b.js";\n\nfunction start() {\n  two();\n}\n\nstart();\n'
B = (
    'import { ONE } from "./a.js";\nimport { three } from "./c.js";\n\n'
    "export function two() {\n  return ONE + three();\n}\n"
)
A = "// What it is for.\n\nexport const ONE = [\n  1,\n];\n"
C = 'import { two } from "./b.js";\n\nexport async function three() {\n  two();\n}\n'
MODULES = {"app.js": APP, "a.js": A, "b.js": B, "c.js": C, "unused.js": "const ONE = 1;\n"}
PAGE = {path.name: path.read_text() for path in PAGE_FOLDER.glob("*.js")}
FORBIDDEN = (
    "</script",
    "<!--",
    "import(",
    "import.meta",
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
)


def test_modules_stand_behind_those_they_need_without_the_words_of_modules() -> None:
    text = bundle(MODULES)
    assert "import" not in text
    assert "export" not in text
    assert text.index("const ONE") < text.index("function two") < text.index("function start")
    assert text.rstrip().endswith("start();")
    assert "unused" not in text


def test_every_module_of_the_page_is_needed_and_no_name_is_declared_twice() -> None:
    text = bundle(PAGE)
    assert all(f"// {name}\n" in text for name in PAGE), "a module that nobody needs"
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE), "an import that is not of plain names"
    declared = re.findall(r"^(?:async )?(?:function\*? ?|class |const |let )([\w$]+)", text, re.MULTILINE)
    assert [name for name, number in Counter(declared).items() if number > 1] == []


@pytest.mark.parametrize("name", PAGE)
def test_a_module_imports_only_what_is_exported_and_makes_no_markup_of_text(name: str) -> None:
    assert [word for word in FORBIDDEN if word in PAGE[name]] == []
    for names, origin in re.findall(r'^import \{ ([^}]*) \} from "\./([\w-]+\.js)";$', PAGE[name], re.MULTILINE):
        exported = re.findall(r"^export (?:async )?(?:function|class|const|let) ([\w$]+)", PAGE[origin], re.MULTILINE)
        assert set(names.split(", ")) <= set(exported)
