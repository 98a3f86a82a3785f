#!/usr/bin/env bash
# Fills tests/gpu/wheels with what run.sh needs and a bare machine lacks, for Python 3.12 on x86-64: tests/gpu/wheels.sh
# The folder is ignored by git: carry it to the machine by hand. Run this where a package index answers.
set -eu
folder=$(dirname "$0")/wheels
PYTHON=${PYTHON:-python3}
PLATFORMS=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do PLATFORMS+=(--platform "${tag}_x86_64"); done

# What autoddp needs by pyproject.toml besides torch, what these packages need, and pytest.
PACKAGES=(optuna==5.0.0 alembic==1.20.1 colorlog==6.12.0 SQLAlchemy==2.1.9 Mako==1.4.3 MarkupSafe tomlkit==0.15.2
    typing-extensions wrapt psutil rich markdown-it-py mdurl pygments msgspec jinja2 shtab nvidia-ml-py pytest pytest-timeout
    iniconfig pluggy numpy tqdm packaging PyYAML)

mkdir -p "$folder"
"$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${PLATFORMS[@]}" -d "$folder" "${PACKAGES[@]}"
du -sh "$folder"
