"""Maps the top-level folders to `samebit.*`; a folder with an `__init__.py` in one of them is found by itself.

`samebit` is a namespace package: nothing is installed under the bare names (`kernels` is taken on PyPI).
"""

from setuptools import find_packages, setup

ROOTS = ("benchmarks", "kernels", "recipes", "rollout", "weight_sync")

setup(
    packages=[f"samebit.{name}" for name in find_packages(include=[p for root in ROOTS for p in (root, f"{root}.*")])],
    package_dir={f"samebit.{root}": root for root in ROOTS},
)
