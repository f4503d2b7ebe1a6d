"""Workers that fail again and again are not started for ever: after three times the user must act."""

import pytest

from parallel_runtime.errors import PoolError


def test_a_torch_that_cannot_be_imported_says_so_and_after_three_times_the_user_must_act(tmp_path, pool_of):
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    pool = pool_of(1, python_path=(str(tmp_path),))
    for _ in range(3):
        with pytest.raises(
            PoolError, match=r"^rank 0: ImportError: libtorch_cpu.so: cannot open .*; .* tries again"
        ) as e:
            pool.start()
        assert "torch/__init__.py" in e.value.detail

    with pytest.raises(PoolError, match="failed 3 times in .* last with: ImportError.*; use Release Parallel Pool"):
        pool.start()
    assert (pool.generation, pool.state) == (3, "failed"), "no rank was started"
    pool.close()
    assert pool.state == "stopped"
    with pytest.raises(PoolError, match="tries again"):
        pool.start()
