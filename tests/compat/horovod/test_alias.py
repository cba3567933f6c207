"""`import horovod.torch` without Horovod."""

from __future__ import annotations

import importlib
import sys

import pytest

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod.alias import _MODULES, install


@pytest.fixture(autouse=True)
def installed():
    finders = list(sys.meta_path)
    install()
    install()
    assert len(sys.meta_path) == len(finders) + 1
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


def test_the_modules_of_horovod_are_those_here():
    torch_module = importlib.import_module("horovod.torch")
    assert {name: getattr(torch_module, name) for name in hvd.__all__} == {
        name: getattr(hvd, name) for name in hvd.__all__
    }
    for name in _MODULES:
        importlib.import_module(name)
    assert sys.modules["horovod.torch.mpi_ops"].allreduce is hvd.allreduce
    assert sys.modules["horovod.torch.mpi_ops"].rank is hvd.rank
    assert sys.modules["horovod.common.exceptions"].HorovodInternalError is not None
    assert sys.modules["horovod.torch.elastic.sampler"].ElasticSampler is hvd.elastic.ElasticSampler
    assert torch_module.elastic.TorchState is hvd.elastic.TorchState


@pytest.mark.parametrize(
    "name", ["horovod.tensorflow", "horovod.keras", "horovod.spark.torch", "horovod.ray", "horovod.torch.other"]
)
def test_a_module_that_is_not_built_is_named(name):
    with pytest.raises(
        ImportError,
        match=rf"^{name.removesuffix('.torch')} is a part of Horovod that is not built here.*HOROVOD_NOT_BUILT",
    ):
        importlib.import_module(name)


def test_a_function_that_is_not_built_is_named():
    torch_module = importlib.import_module("horovod.torch")
    for module in (hvd, torch_module):
        with pytest.raises(AttributeError, match=r"hvd.start_timeline is a part .*torch.profiler.*HOROVOD_NOT_BUILT"):
            module.start_timeline("file")
        assert not hasattr(module, "nothing")


def test_names_of_the_packages():
    package = importlib.import_module("horovod")
    assert package.__version__ == "0.28.1"
    assert package.torch.mpi_ops.allreduce is hvd.allreduce
    with pytest.raises(AttributeError, match=r"horovod.run is a part .*HOROVOD_NOT_BUILT"):
        package.run  # noqa: B018
    assert not hasattr(package.torch, "_private")
