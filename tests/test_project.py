"""Laws about the repository itself: its floors, its files, its texts."""

import ast
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pagedweight_jax", "pallas_kernels", "checkpoints_tools")
MAX_FILE_BYTES = 40_000_000

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="not a git clone of the project"
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One py_library of BUILD."""

    name: str
    srcs: frozenset[Path]
    deps: frozenset[str]


def layer_rows() -> list[list[str]]:
    """Module names of the import contract, a list for each floor, top floor first."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.strip(" ()") for name in re.split(r"[|:]", row)] for row in layers]


def build_targets() -> list[Target]:
    """The py_library targets of BUILD, in its order."""
    targets = []
    for node in ast.walk(ast.parse((ROOT / "BUILD").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "py_library":
            fields = {keyword.arg: keyword.value for keyword in node.keywords}
            targets.append(
                Target(
                    name=ast.literal_eval(fields["name"]),
                    srcs=frozenset(
                        path
                        for pattern in _strings(fields.get("srcs"))
                        for path in ROOT.glob(pattern)
                    ),
                    deps=frozenset(
                        dep.removeprefix(":") for dep in _strings(fields.get("deps"))
                    ),
                )
            )
    return targets


def _strings(node: ast.expr | None) -> list[str]:
    """Strings in a BUILD attribute, inside glob() or not."""
    if node is None:
        return []
    return [
        constant.value
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]


def target_name(module: str) -> str:
    return module.rpartition(".")[2]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def repository_files() -> list[Path]:
    """Files that are tracked, or would be after `git add --all`."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_build_lists_the_floors_in_the_order_of_the_import_contract():
    floor_of = {
        target_name(module): floor
        for floor, row in enumerate(layer_rows())
        for module in row
    }
    floors = [t.name for t in build_targets() if t.name in floor_of]
    assert sorted(floors) == sorted(floor_of), "BUILD and pyproject.toml differ"
    assert floors == sorted(floors, key=floor_of.__getitem__)


def test_each_build_target_depends_on_the_next_floor_down():
    targets = {target.name: target for target in build_targets()}
    rows = layer_rows()
    for row, below in zip(rows, [*rows[1:], []], strict=True):
        for name in map(target_name, row):
            # The menu is the package's __init__, which imports nothing by itself.
            deps = targets[name].deps - {"menu"}
            assert deps == set(map(target_name, below)), f"deps of :{name}"


def test_every_module_belongs_to_exactly_one_floor():
    targets = build_targets()
    module_of = {target_name(name): name for row in layer_rows() for name in row}
    module_of["menu"] = "pagedweight_jax"
    for path in python_files():
        owners = [target.name for target in targets if path in target.srcs]
        name = module_name(path)
        assert len(owners) == 1, f"{name} is in the BUILD targets {owners}, wanted one"
        assert f"{name}.".startswith(f"{module_of[owners[0]]}.")


def test_every_floor_in_build_has_sources():
    floors = {target_name(module) for row in layer_rows() for module in row}
    assert not [t.name for t in build_targets() if t.name in floors and not t.srcs]


def test_every_public_module_has_a_docstring():
    missing = [
        module_name(path)
        for path in python_files()
        if not re.search(r"\._(?!_)", f".{module_name(path)}")
        and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not missing


def test_no_file_of_the_repository_is_large():
    sizes = {path: path.stat().st_size for path in repository_files()}
    assert not {p: size for p, size in sizes.items() if size > MAX_FILE_BYTES}
    demo = sum(s for p, s in sizes.items() if p.is_relative_to(ROOT / PACKAGES[0]))
    assert demo < MAX_FILE_BYTES, f"{PACKAGES[0]} with its demo is {demo} bytes"


def test_no_text_names_a_machine_or_a_registry():
    # Put together here, so that this file does not hold what it forbids.
    homes = "|".join(["work", "root", r"home/\w+", r"Users/\w+"])
    hosts = "|".join(
        ["pypi" + r"\.org", "pythonhosted" + r"\.", "npmjs" + r"\.", "yarnpkg" + r"\."]
    )
    forbidden = re.compile(rf"(?<![\w.~/-])/(?:{homes})(?![\w-])|{hosts}")
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        text = content.decode("utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), start=1):
            if match := forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found
