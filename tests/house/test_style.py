"""How the product is written, read from the source.

Whole interfaces, own names, short functions and files.
"""

import ast
import re

import pytest
from places import ROOT

ROOMS = ("apex", "actors", "learner", "replay_rank", "native", "launch", "configs")
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
C_FILES = sorted((ROOT / "native").glob("*.[ch]"))
LONGEST_FUNCTION, LONGEST_MODULE = 60, 500

PROBES = {"getattr", "hasattr", "setattr", "delattr"}
# Documented, in spite of the underscore: of named tuples, of ``os``, and torch's operations on lists of
# tensors.
DOCUMENTED = re.compile(r"_replace|_asdict|_fields|_make|_exit|_foreach_\w+")


def name_of(path):
    return str(path.relative_to(ROOT))


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and not DOCUMENTED.fullmatch(name)


def probes(nodes):
    """Return the calls that ask an object for an attribute by a name that the text gives."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if call.func.id in PROBES and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    ]


def own_names(nodes):
    """Return the private names that a file defines: its functions, its classes' attributes, its variables."""
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return names | {node.attr for node in stored if is_self(node.value)}


def is_self(node):
    """Whether a node is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_privates(nodes):
    """Return the uses of a private name that belongs to another file: of another's attribute, or imported."""
    own = own_names(nodes)
    used = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    found = [f"line {n.lineno}: {ast.unparse(n)}" for n in used if not is_self(n.value) and n.attr not in own]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return found + [f"line {n.lineno}: {a.name}" for n in imports for a in n.names if is_private(a.name)]


def too_long(nodes):
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    return {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}


PROBES_LEFT = {
    "apex/transport/mpi_comm.py": 1,  # older releases of mpi4py have no Comm.Get_failed
}
PRIVATES_LEFT = {
    "native/__init__.py",  # native._native is its own part
    "launch/bench/baselines.py",  # torchrl's trees in C++ have no public name
}


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_object_is_asked_by_text_whether_it_has_an_attribute(path):
    found = probes(nodes_of(path))
    assert len(found) <= PROBES_LEFT.get(name_of(path), 0), found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_file_uses_the_private_names_of_another(path):
    assert name_of(path) in PRIVATES_LEFT or not foreign_privates(nodes_of(path))


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS], ids=name_of)
def test_modules_and_functions_are_short(path):
    assert path.read_text().count("\n") <= LONGEST_MODULE
    assert not too_long(nodes_of(path))


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_files_of_c_are_short(path):
    assert path.read_text().count("\n") <= LONGEST_MODULE


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


# --- the readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["hasattr(port, 'state')", "x = getattr(comm, 'life', 0)", "def f(p):\n    setattr(p, 'a', 1)"]
)
def test_a_probe_is_found_wherever_it_stands(source):
    assert len(probes(list(ast.walk(ast.parse(source))))) == 1


@pytest.mark.parametrize("source", ["getattr(options, name)", "self.hasattr('a')", "vars(x)['a']"])
def test_other_calls_are_no_probes(source):
    assert not probes(list(ast.walk(ast.parse(source))))


@pytest.mark.parametrize(
    "source", ["port._send()", "intake._free = []", "from apex.role import _end", "self.n_step._returns"]
)
def test_a_private_name_of_another_file_is_found(source):
    assert len(foreign_privates(list(ast.walk(ast.parse(source))))) == 1


OWN_PRIVATES = [
    "class A:\n    def f(self):\n        return self._x + super()._y",
    "class A:\n    def __init__(self):\n        self._x = 1\n"
    "    def same(self, other):\n        return self._x == other._x",
    "class A:\n    def _f(self): ...\ndef g(a):\n    return a._f()",
    "point._replace(x=1)",
    "os._exit(1)",
    "a.__dict__",
]


@pytest.mark.parametrize("source", OWN_PRIVATES)
def test_a_private_name_of_the_file_itself_may_be_used(source):
    assert not foreign_privates(list(ast.walk(ast.parse(source))))


def test_the_names_of_tests_have_fewer_than_90_characters():
    names = [node.name for path in TESTS for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    assert not [name for name in names if name.startswith("test_") and len(name) >= 90]


@pytest.mark.parametrize("path", [path for path in PRODUCT if path.name != "variables.py"], ids=name_of)
def test_only_one_module_spells_environment_variables_of_ours(path):
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [text for text in strings if isinstance(text, str) and re.fullmatch(r"APEX_[A-Z_]*", text)]
