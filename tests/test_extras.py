"""Imports run downwards and in no circle, and each extra stands alone."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from tests.infrastructure.forks import ROOT

BELOW = {  # what each part of the core may import, besides itself
    "loaders": set(),
    "data": {"loaders"},
    "models": {"loaders"},
    "training": {"data", "models", "loaders"},
    "train": {"training", "data", "models", "loaders"},
    "scripts": {"training", "data", "models", "loaders"},
    "tests": {"train", "training", "data", "models", "loaders", "scripts", "examples"},
}


# The files of the repository by the names of their modules; a package is the name of its folder.
PATHS = [path for folder in (*BELOW, "extras", "examples") for path in (ROOT / folder).rglob("*.py")]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PATHS]
MODULES = {"train": ROOT / "train.py", **dict(zip(NAMES, PATHS, strict=True))}
IMPORTS = ast.Import, ast.ImportFrom


@cache
def import_statements(name):
    """Those outside of functions, and all."""
    tree = ast.parse(MODULES[name].read_text())
    everywhere = [node for node in ast.walk(tree) if isinstance(node, IMPORTS)]
    return [node for node in tree.body if isinstance(node, IMPORTS)], everywhere


def imports(name, lazy_too=True):
    """The repository's modules that the module `name` imports; `lazy_too`: also in functions."""
    is_package = MODULES[name].name == "__init__.py"
    for node in import_statements(name)[lazy_too]:
        found = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            package = name.split(".")[: len(name.split(".")) + is_package - node.level] if node.level else []
            source = ".".join([*package, *filter(None, [node.module])])
            found = [f"{source}.{each}" for each in found]
        for imported in found:
            while imported and imported not in MODULES:  # a name in a module
                imported = imported.rpartition(".")[0]
            if imported:
                yield imported


def test_imports_of_the_core_run_downwards():
    for name in MODULES:
        if (part := name.split(".")[0]) in BELOW:
            found = {one.split(".")[0] for one in imports(name)}
            assert found <= BELOW[part] | {part}, name


def test_the_rest_of_the_repository_imports_from_the_loaders_package_and_no_deeper():
    for name in MODULES:
        if name.split(".")[0] not in ("loaders", "tests") and ".tests." not in name:
            deeper = [module for module in imports(name) if module.startswith("loaders.")]
            assert deeper == [], name


def test_there_is_no_circle_of_imports_lazy_ones_counted():
    TopologicalSorter({name: set(imports(name)) - {name} for name in MODULES}).prepare()  # a CycleError names them


def test_no_test_file_imports_a_slow_package_when_it_is_collected():
    slow = re.compile(r"^(import|from) (datasets|pandas|pyarrow|timm|torchvision)\b", re.MULTILINE)
    for path in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("extras/*/tests/test_*.py")):
        assert not slow.search(path.read_text()), f"{path}: see tests/infrastructure/later.py"


def test_an_extra_imports_no_other_but_the_benchmarks_lazily():
    for name in (one for one in MODULES if one.startswith("extras.")):
        own = name.split(".")[1]
        found = imports(name, lazy_too=own != "benchmarks")
        assert {one.split(".")[1] for one in found if one.startswith("extras.")} <= {own}, name


def test_a_script_that_is_run_by_its_path_leaves_the_names_of_its_folder_to_others(tmp_path, python, bound):
    scripts = [path for path in PATHS if "sys.path.insert(0" in path.read_text() and "tests" not in path.parts]
    assert scripts or not (ROOT / "extras").exists()  # a fork may have deleted them
    assert all("\n    run_script(" in path.read_text() for path in scripts)
    (tmp_path / "evaluate.py").write_text("raise ImportError('that of the script')")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "evaluate.py").write_text("print('that of others')")
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}]\nsys.path.append({str(tmp_path / 'packages')!r})\n"
        "from training.script import run_script\n"
        "run_script(lambda: [__import__(name) for name in ('train', 'evaluate')])\n"
    )
    done = python.run(tmp_path / "script.py", cwd=tmp_path / "packages", timeout=bound)
    assert done.stdout == "that of others\n", done.stderr


def users(part):
    """The files, but for tests, that import a module of this file or folder, or its public names from `loaders`."""
    own = {name for name, path in MODULES.items() if (ROOT / part) in (path, *path.parents)}
    public = {node.name for name in own for node in ast.parse(MODULES[name].read_text()).body if hasattr(node, "name")}
    for name in MODULES.keys() - own:
        froms = [node for node in import_statements(name)[1] if isinstance(node, ast.ImportFrom)]
        lifted = {alias.name for node in froms if node.module == "loaders" for alias in node.names}
        if "tests" not in name.split(".") and (lifted & public or own & set(imports(name))):
            yield MODULES[name].relative_to(ROOT)


ROWS = re.findall(r"^\| `(\S+)`.* \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("part", "text"), [row for row in ROWS if "conf/" not in row[0]])
def test_contributing_names_all_that_uses_a_part_which_one_may_delete(part, text):
    named = [Path(path) for path in re.findall("`([^`]+)`", text)]
    used_by = set(users(part))
    assert all(any(path in (user, *user.parents) for path in named) for user in used_by), used_by
    for path in named:
        assert any(path in (user, *user.parents) for user in used_by) or not (ROOT / path).exists(), path


def test_every_config_file_has_a_name_of_its_own_and_each_extra_says_what_it_is():
    conf = {path.relative_to(ROOT / "conf"): path for path in (ROOT / "conf").rglob("*.yaml")}
    assert not [path for path in conf.values() if "_target_: extras." in path.read_text()]
    for path in (*ROOT.glob("extras/*/conf/**/*.yaml"), *ROOT.glob("examples/*/conf/**/*.yaml")):
        other = conf.setdefault(Path(*path.relative_to(ROOT).parts[3:]), path)
        assert other == path, f"Hydra would read {other} instead of {path}"
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    for folder in (path for path in (ROOT / "extras").glob("*") if path.is_dir() and path.name[0] not in "._"):
        assert len((folder / "README.md").read_text().splitlines()) <= 12, folder
