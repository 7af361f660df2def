"""Settings that all tests share: how hard hypothesis tries, and where GPU tests run."""

import pytest
from hypothesis import HealthCheck, settings

# The name replaces hypothesis' own `ci` profile, which draws the same examples in every run.
# `--hypothesis-profile=thorough` is for a night, not for every change.
settings.register_profile(
    "ci",
    derandomize=False,
    deadline=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.load_profile("ci")

collect_ignore = ["fuzz/guided.py"]  # needs atheris, which has an environment of its own


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
