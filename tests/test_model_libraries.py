"""Libraries that models come from, as plugins describe them: a library of a test's own, beside those of this project."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import colofunc as cf
from colofunc.functional.checkpoint.libraries import PLAIN, Library, adapter_formats, libraries, library_of
from colofunc.integrations import formats
from colofunc.plugins import build_registry
from colofunc.plugins import registry as plugin_registry

PLUGIN = '''
import colofunc as cf
from torch import nn

class Theirs(nn.Linear):
    """A module of the library, whose files call every tensor "their...": """

def names(module):
    return {f"their.{name}": name for name in module.state_dict()}

def entries(module, stored):
    return {names(module)[name]: entry for name, entry in stored.items()}

def to_stored(module, tensors):
    return {f"their.{name}": tensor for name, tensor in tensors.items()}

def has_name(module):
    return names(module).__contains__

OWNS = cf.ext.libraries.has_base("their_library", "Theirs")
LIBRARY = cf.ext.libraries.Library("theirs", owns=OWNS, has_name=has_name, entries=entries, to_stored=to_stored)

@cf.hookimpl
def colofunc_model_libraries():
    return {"theirs": LIBRARY, **MORE}

MORE = {}
'''


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The library, installed: on the path, with an entry point as pip writes it."""
    (tmp_path / "their_library.py").write_text(PLUGIN)
    about = tmp_path / "their_library-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-library\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[colofunc]\ntheirs = their_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    build_registry.cache_clear()
    libraries()
    yield sys.modules["their_library"]
    build_registry.cache_clear()
    del sys.modules["their_library"]


def test_a_plugins_library_names_tensors_in_files(tmp_path: Path, theirs: ModuleType) -> None:
    model = cf.functional(theirs.Theirs(4, 3))
    cf.save_pretrained(model, None, tmp_path / "a")
    assert sorted(load_file(tmp_path / "a" / "model.safetensors")) == ["their.bias", "their.weight"]
    again = cf.load(tmp_path / "a", model=theirs.Theirs(4, 3))
    for name, value in model.params.items():
        assert torch.equal(again.params[name], value)
    assert library_of(nn.Linear(4, 3)) is PLAIN


def test_adapters_beside_a_model_under_the_librarys_own_file_name(
    tmp_path: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, "LIBRARY", attrs.evolve(theirs.LIBRARY, stem="their_model", owns=_of_theirs))
    build_registry.cache_clear()
    base = nn.Sequential(theirs.Theirs(4, 3))
    folder = tmp_path / "a"
    folder.mkdir()
    stored = {f"their.{name}": value for name, value in base.state_dict().items()}
    save_file(stored, folder / "their_model.safetensors")
    trained = cf.lora(cf.functional(base), "*", rank=2, alpha=4.0)
    trained = attrs.evolve(trained, params={name: torch.ones_like(value) for name, value in trained.params.items()})
    cf.save_pretrained(trained, None, folder, adapters="peft")
    other = cf.lora(cf.functional(nn.Sequential(theirs.Theirs(4, 3))), "*", rank=2, alpha=4.0)
    again = cf.load(folder, model=other)
    for name, value in {**trained.params, **trained.frozen}.items():
        assert torch.equal({**again.params, **again.frozen}[name], value), name
    assert cf.load(folder).keys() == stored.keys()
    plain = cf.load(folder, model=nn.Sequential(theirs.Theirs(4, 3)))
    assert torch.equal(plain.params["0.weight"], base[0].weight)

    cf.save_pretrained(cf.functional(base), None, tmp_path / "b")
    with pytest.raises(cf.CheckpointError, match=r"wrote \(their_model\.safetensors\)"):
        cf.save_pretrained(trained, None, tmp_path / "b", adapters="peft")


def with_adapters(theirs: ModuleType, name: str) -> Library:
    """The library, which keeps adapters as peft does, in files of other names."""
    peft = formats.LIBRARIES["peft"].adapters
    assert peft is not None
    known = attrs.evolve(peft, name=name, config="their_adapters.json", stem="their_adapters", save_config=_saved_config)
    return attrs.evolve(theirs.LIBRARY, adapters=known)


def _saved_config(module: nn.Module, adapters: Any, folder: Path, dtype: Any) -> None:
    (folder / "their_adapters.json").write_text("{}")


def test_adapters_in_a_librarys_own_files(tmp_path: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "LIBRARY", with_adapters(theirs, "theirs"))
    build_registry.cache_clear()
    adapted = cf.lora(cf.functional(nn.Sequential(nn.Linear(4, 3))), "*", rank=2)
    cf.save_pretrained(adapted, None, tmp_path / "a", adapters="theirs")
    assert sorted(path.name for path in (tmp_path / "a").glob("their*")) == ["their_adapters.json", "their_adapters.safetensors"]
    assert len(load_file(tmp_path / "a" / "their_adapters.safetensors")) == 2
    # they are known as adapters: no whole model is written over them
    with pytest.raises(cf.CheckpointError, match=r"holds adapters \(their_adapters\.json\).* adapters='theirs'"):
        cf.save_pretrained(adapted, None, tmp_path / "a")
    own = cf.functional(theirs.Theirs(4, 3))
    with pytest.raises(cf.InputError, match=r"adapters='peft', and the model has adapters of theirs\. Try: adapters='theirs'"):
        cf.save_pretrained(own, None, tmp_path / "b", adapters="peft")


@pytest.mark.parametrize("name", ["peft", "merged"])
def test_formats_of_adapters_have_names_of_their_own(theirs: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "LIBRARY", with_adapters(theirs, name))
    build_registry.cache_clear()
    with pytest.raises(cf.PluginError, match=f"'theirs' calls its format of adapters '{name}', which is taken"):
        adapter_formats()


def _of_theirs(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module[0]).__name__ == "Theirs"


def test_plugins_are_asked_for_a_module_before_our_libraries(theirs: ModuleType) -> None:
    """Their model may be a subclass of a model of transformers."""
    ours = type("PreTrainedModel", (nn.Linear,), {"__module__": "transformers.modeling_utils"})
    both = type("Theirs", (ours,), {"__module__": "their_library"})
    assert library_of(ours(4, 3)) is formats.LIBRARIES["transformers"]
    assert library_of(both(4, 3)) is theirs.LIBRARY


def test_a_library_says_which_of_its_layers_have_transposed_weights(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    base = cf.functional(nn.Sequential(Across()))
    with pytest.raises(cf.InputError, match="'0' is a Across"):
        cf.lora(base, "0", rank=2)
    monkeypatch.setattr(theirs, "LIBRARY", attrs.evolve(theirs.LIBRARY, has_transposed_weight=lambda x: type(x) is Across))
    build_registry.cache_clear()
    model = cf.lora(base, "0", rank=2)
    params, x = {name: torch.randn_like(value) for name, value in model.params.items()}, torch.randn(3, 4)
    assert model.params["0.lora_A"].shape == (2, 4)
    torch.testing.assert_close(model.to_module(params)(x), model.apply(params, {}, x)[0])


def test_a_module_that_two_plugins_own_is_an_error(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(theirs.MORE, "another", attrs.evolve(theirs.LIBRARY, name="another"))
    build_registry.cache_clear()
    said = "colofunc_model_libraries: 'theirs' and 'another' both have a module of Theirs as their own.* Try: owns= in"
    with pytest.raises(cf.PluginError, match=said):
        library_of(theirs.Theirs(4, 3))
    assert library_of(nn.Linear(4, 3)) is PLAIN


def test_a_folder_is_of_one_format_of_adapters(tmp_path: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "LIBRARY", with_adapters(theirs, "theirs"))
    build_registry.cache_clear()
    for config in ("their_adapters.json", "adapter_config.json"):
        (tmp_path / config).write_text("{}")
    said = r"holds adapters of 'peft' \(adapter_config\.json\) and of 'theirs' \(their_adapters\.json\).* Try: a folder for each"
    with pytest.raises(cf.CheckpointError, match=said):
        cf.load(tmp_path, model=theirs.Theirs(4, 3))
    known = theirs.LIBRARY.adapters
    monkeypatch.setattr(theirs, "LIBRARY", attrs.evolve(theirs.LIBRARY, adapters=attrs.evolve(known, config="adapter_config.json")))
    build_registry.cache_clear()
    said = r"'peft' and 'theirs' are both known by the file 'adapter_config\.json'.* Try: another config="
    with pytest.raises(cf.PluginError, match=said):
        adapter_formats()


def test_our_libraries_come_first_and_by_the_same_hook(theirs: ModuleType) -> None:
    assert list(libraries()) == [*formats.LIBRARIES, "theirs"]
    assert plugin_registry.formats_registry() is build_registry((formats,))


def test_what_is_no_library_is_named(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "LIBRARY", 7)
    build_registry.cache_clear()
    with pytest.raises(cf.PluginError, match=r"the value of 'theirs' is 7; give a cf\.ext\.libraries\.Library"):
        libraries()


def test_reading_a_plain_module_imports_no_library(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    """Models are recognised by the names of their classes."""
    script = (
        "import sys, torch, colofunc as cf\n"
        "cf.save_pretrained(cf.functional(torch.nn.Linear(4, 3)), None, sys.argv[1])\n"
        "cf.load(sys.argv[1], model=torch.nn.Linear(4, 3))\n"
        "print(sorted({'transformers', 'peft', 'diffusers', 'bitsandbytes', 'torchao'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
