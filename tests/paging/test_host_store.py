import numpy as np
import pytest
from paging_cases import random_host

from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.table import PlaneId


@pytest.mark.parametrize("frames_per_plane", [1, 2, 4])
def test_read_gives_gate_frames_then_up_frames(frames_per_plane: int):
    host = random_host(np.random.default_rng(0), 2, 3, 4, plane_words=8)
    words = 8 // frames_per_plane
    out = np.zeros((2 * frames_per_plane, words), np.uint32)
    host.read(PlaneId(1, 2, 0, 3), out)
    gate, up, down = host.planes[1][3][2].reshape(3, frames_per_plane, words)
    np.testing.assert_array_equal(out, np.concatenate([gate, up]))
    host.read(PlaneId(1, 2, 1, 3), out[:frames_per_plane])
    np.testing.assert_array_equal(out[:frames_per_plane], down)


def test_planes_may_be_memory_mapped(tmp_path):
    host = random_host(np.random.default_rng(0), 1, 2, 2, plane_words=4)
    mapped = []
    for j, plane in enumerate(host.planes[0]):
        np.save(tmp_path / f"{j}.npy", plane)
        mapped.append(np.load(tmp_path / f"{j}.npy", mmap_mode="r"))
    out, expected = np.zeros((2, 2, 4), np.uint32)
    plane = PlaneId(0, 1, 0, 1)
    HostStore([mapped]).read(plane, out)
    host.read(plane, expected)
    np.testing.assert_array_equal(out, expected)


def test_nbytes_counts_all_planes():
    host = random_host(np.random.default_rng(0), 2, 3, 4, plane_words=8)
    assert host.nbytes == 2 * 3 * 4 * 3 * 8 * 4


def test_a_wrong_size_of_out_is_refused():
    host = random_host(np.random.default_rng(0), 1, 1, 1, plane_words=8)
    with pytest.raises(ValueError, match=r"has 16 words but out is \(1, 8\)"):
        host.read(PlaneId(0, 0, 0, 0), np.zeros((1, 8), np.uint32))


def test_unequal_layers_are_refused():
    host = random_host(np.random.default_rng(0), 2, 3, 4, plane_words=8)
    with pytest.raises(ValueError, match="layer 1 has 3 planes"):
        HostStore([host.planes[0], host.planes[1][:3]])
    with pytest.raises(ValueError, match="at least one layer"):
        HostStore([])
