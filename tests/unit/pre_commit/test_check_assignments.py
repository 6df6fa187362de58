"""The check has to find every way of assigning onto the host, and nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.pre_commit import check_assignments
from tools.pre_commit.check_assignments import ASSIGNS, PACKAGE, check, main

MODULE = "from vllm_omni.diffusion import data\n"
CLASS = "from vllm_omni.diffusion.data import OmniDiffusionConfig as Config\n"

BAD = {
    "attribute of a module": MODULE + "data.limit = 3",
    "attribute of an aliased class": CLASS + "Config.limit = 3",
    "attribute further down": "import vllm\nvllm.config.VllmConfig.limit = 3",
    "vLLM under another name": "import vllm.config as c\nc.limit = 3",
    "annotated": MODULE + "data.limit: int = 3",
    "one of several targets": MODULE + "ours, (data.limit, *data.rest) = 1, (2, 3)",
    "augmented": MODULE + "data.limit += 3",
    "a set in place": "from vllm_omni.config.omni_config import FIELDS\nFIELDS |= {'x'}",
    "item": MODULE + "data.TABLE['x'] = 3",
    "item of a name": "from vllm_omni.diffusion.data import TABLE\nTABLE['x'] = 3",
    "deleted attribute": MODULE + "del data.limit",
    "deleted item": MODULE + "del data.TABLE['x']",
    "loop variable": MODULE + "for data.limit in (1, 2): pass",
    "with": MODULE + "with open('x') as data.file: pass",
    "setattr": CLASS + "setattr(Config, 'limit', 3)",
    "delattr": CLASS + "delattr(Config, 'limit')",
    "object.__setattr__": CLASS + "object.__setattr__(Config, 'limit', 3)",
    "type.__setattr__": CLASS + "type.__setattr__(Config, 'limit', 3)",
    "own __setattr__": MODULE + "data.__setattr__('limit', 3)",
    "update": MODULE + "data.TABLE.update(x=3)",
    "update of __dict__": MODULE + "data.__dict__.update(x=3)",
    "vars": MODULE + "vars(data)['x'] = 3",
    "append": MODULE + "data.NAMES.append('x')",
    "mock.patch": "from unittest.mock import patch\npatch('vllm_omni.diffusion.data.limit', 3).start()",
    "mock.patch.object": "from unittest import mock\n" + CLASS + "mock.patch.object(Config, 'limit', 3).start()",
    "mock.patch.dict": "import unittest.mock as m\n" + MODULE + "m.patch.dict(data.TABLE, x=3).start()",
    "mock.patch under another name": "from unittest.mock import patch as p\n" + CLASS + "p.object(target=Config)",
    "monkeypatch": MODULE + "def test(monkeypatch):\n    monkeypatch.setattr(data, 'limit', 3)",
    "monkeypatch by path": "def test(monkeypatch):\n    monkeypatch.setattr('vllm_omni.diffusion.data.limit', 3)",
    "sys.modules": "import sys\nsys.modules['vllm_omni.diffusion.data'].limit = 3",
    "sys.modules by a constant": "import sys\n_DATA = 'vllm_omni.diffusion.data'\nsys.modules[_DATA].limit = 3",
    "sys.modules by an f-string": "import sys\n_HOST = 'vllm_omni'\nsys.modules[f'{_HOST}.{name}'].limit = 3",
    "sys.modules by an unknown name": "import sys\ndef f(name):\n    sys.modules[name].limit = 3",
    "sys.modules.get": "from sys import modules as loaded\ndata = loaded.get('vllm_omni.x')\ndata.limit = 3",
    "an entry of sys.modules": "import sys\nsys.modules['vllm_omni.x'] = object()",
    "an entry removed from sys.modules": "import sys\nsys.modules.pop('vllm_omni.x')",
    "import_module": "from importlib import import_module\nimport_module('vllm.config').limit = 3",
    "getattr": MODULE + "setattr(getattr(data, name), 'limit', 3)",
    "import in a function": "def f():\n    from vllm_omni.diffusion import data\n    data.limit = 3",
    "import seen from an inner function": MODULE + "def f():\n    def g():\n        data.limit = 3",
    "alias": MODULE + "ours = theirs = data\ntheirs.limit = 3",
    "alias of an attribute": MODULE + "config = data.Config\nconfig.limit = 3",
    "walrus": MODULE + "if (config := data.Config): config.limit = 3",
    "either one": MODULE + "(data.A if x else None).limit = 3",
    "on self": MODULE
    + "class C:\n    def f(self):\n        self.data = data\n    def g(self):\n        self.data.limit = 3",
    "loop over classes": MODULE + "for cls in (data.A, data.B):\n    cls.limit = 3",
    "loop over a table of ours": MODULE + "OURS = {'a': data.A}\nfor name, cls in OURS.items():\n    cls.limit = 3",
    "loop over a table of theirs": MODULE + "for cls in data.REGISTRY.values():\n    cls.limit = 3",
    "default of a parameter": CLASS + "def f(cls=Config):\n    cls.limit = 3",
    "argument of a function": CLASS + "def f(cls, n):\n    cls.limit = n\nf(Config, 3)",
    "keyword argument of a method": CLASS + "class C:\n    def f(self, cls):\n        cls.limit = 3\nC().f(cls=Config)",
    "result of a function": CLASS + "def f():\n    return Config\nf().limit = 3",
    "a module that is handed in": "from types import ModuleType\ndef f(module: ModuleType):\n    module.limit = 3",
}

GOOD = {
    "reading": MODULE + "limit = data.limit\nlimit = limit + 1",
    "a local of the same name": MODULE + "def f(data):\n    data.limit = 3",
    "an instance": CLASS + "config = Config()\nconfig.limit = 3",
    "a subclass": CLASS + "class Ours(Config):\n    limit = 3\nOurs.limit = 4",
    "a table of ours": CLASS
    + "OURS = [Config]\nOURS.append(None)\nOURS[0] = None\nNAMES = {'a': 1}\nNAMES.update(b=Config)",
    "sys.modules of ours": "import sys\nsys.modules[__name__].x = 3\nsys.modules['vllm_omni_diffusion_compile'].x = 3",
    "our package": "from vllm_omni_diffusion_compile import settings\nsettings.limit = 3",
    "relative": "from .vllm import limit\nlimit.x = 3",
    "copy of a table": MODULE + "copy = dict(data.TABLE)\ncopy['x'] = 3",
    "somebody else's": "import torch\ntorch.x = 3",
    "patch of ours": "from unittest.mock import patch\npatch('vllm_omni_diffusion_compile.x', 3)",
    "call of an ordinary method": MODULE + "data.logger.info('x')",
    "two scopes": "def f():\n    from vllm_omni import data\n    return 1\ndef g(data):\n    data.x = 3",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_assignment_onto_the_host_is_found(source: str) -> None:
    found = check(source)
    assert len(found) >= 1
    assert all(finding.line >= 1 for finding in found)


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD.keys())
def test_everything_else_is_left_alone(source: str) -> None:
    assert check(source) == []


def test_finding_says_where_what_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """\
        def apply():
            from vllm_omni.diffusion.data import OmniDiffusionConfig

            OmniDiffusionConfig.limit = 3
        """
    path = tmp_path / "adapter.py"
    path.write_text(textwrap.dedent(source))
    assert main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}:4: `OmniDiffusionConfig.limit = 3` changes vllm_omni.diffusion.data.OmniDiffusionConfig" in printed
    assert "make it a Graft in upstream/ledger.py" in printed


def test_good_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "adapter.py"
    path.write_text(GOOD["reading"])
    assert main([str(path)]) == 0


def test_the_one_module_that_assigns_would_be_found_if_it_were_not_excepted() -> None:
    assert check(ASSIGNS.read_text())
    assert main([str(ASSIGNS)]) == 0


def test_without_files_the_whole_package_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PACKAGE.name == "vllm_omni_diffusion_compile"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "bad.py").write_text(BAD["setattr"])
    monkeypatch.setattr(check_assignments, "PACKAGE", tmp_path)
    assert main() == 1
    assert "bad.py:2:" in capsys.readouterr().out
