"""Laws of the bundle: modules behind those they need, and one that breaks the page's rules is refused by name."""

from __future__ import annotations

import pytest

from halation.gallery.html_export import PAGE_FOLDER, BundleError, bundle

APP = 'import { two } from "./b.js";\n\nfunction start() {\n  two();\n}\n\nstart();\n'
B = 'import { ONE } from "./a.js";\nimport { three } from "./c.js";\n\nexport function two() {\n  return ONE + three();\n}\n'
A = "// What it is for.\n\nexport const ONE = [\n  1,\n];\n"
C = "export async function three() {}\n"
MODULES = {"app.js": APP, "a.js": A, "b.js": B, "c.js": C, "unused.js": "const ONE = 1;\n"}


def test_modules_stand_behind_those_they_need_without_the_words_of_modules() -> None:
    text = bundle(MODULES)
    assert "import" not in text
    assert "export" not in text
    assert text.index("const ONE") < text.index("function two") < text.index("function start")
    assert text.rstrip().endswith("start();")
    assert "unused" not in text


def test_the_page_keeps_its_rules() -> None:
    modules = {path.name: path.read_text() for path in PAGE_FOLDER.glob("*.js")}
    text = bundle(modules)
    assert all(f"// {name}\n" in text for name in modules), "a module that nobody needs"


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("c.js", 'import { a as b } from "./a.js";\n', "c.js: an import"),
        ("c.js", 'import {\n  ONE,\n} from "./a.js";\n', "c.js: an import"),
        ("c.js", 'import "./a.js";\n', "c.js: an import"),
        ("c.js", 'import { ONE } from "https://elsewhere/a.js";\n', "c.js: an import"),
        ("c.js", "export default function three() {}\n", "neither a declaration"),
        ("c.js", "function three() {}\nexport { three };\n", "neither a declaration"),
        ("c.js", C + "three();\n", "neither a declaration"),
        ("c.js", C + "const ONE = 2;\n", "c.js and a.js both declare ONE"),
        ("c.js", "function three() {}\n", "imports three, which c.js does not export"),
        ("c.js", 'export async function three() {\n  await import("./a.js");\n}\n', "c.js holds import"),
        ("c.js", 'export function three() {\n  return "</script>";\n}\n', "c.js holds </script"),
        ("c.js", "export function three(node) {\n  node.innerHTML = 1;\n}\n", "c.js holds innerHTML"),
        ("app.js", APP + "// more\n", "and not with start"),
        ("app.js", APP.replace("./b.js", "./gone.js"), "app.js needs gone.js"),
    ],
)
def test_a_module_that_breaks_a_rule_is_refused_by_name(name: str, text: str, pattern: str) -> None:
    with pytest.raises(BundleError, match=pattern):
        bundle(MODULES | {name: text})
