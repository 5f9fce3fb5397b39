import pytest

from nestling.inner.own_environment import own_environment


def test_gpus_are_counted_in_a_child_as_here_and_keys_stay_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    seen = own_environment("VLLM_CACHE_ROOT")
    assert (seen["CUDA_DEVICE_ORDER"], seen["VLLM_CACHE_ROOT"]) == ("PCI_BUS_ID", "/cache")
    assert seen["OMP_NUM_THREADS"] == "1"
    assert "HF_TOKEN" not in seen
    assert "VLLM_CACHE_ROOT" not in own_environment()
