# SPDX-License-Identifier: Apache-2.0
"""What C++ users get: the names that the libraries export, and programs built against an installed
winnow by CMake and by pkg-config, and against its sources as a part of another project."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import winnow

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "consumer"
BUILD = Path(os.environ.get("WINNOW_LIBRARY", ROOT / "build/release/libwinnow.so")).parent.resolve()

pytestmark = pytest.mark.skipif(
    not (BUILD / "CMakeCache.txt").exists() or not shutil.which("cmake"),
    reason="the library does not come from a build of this tree",
)


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def option(build: Path, name: str) -> bool:
    cache = (build / "CMakeCache.txt").read_text()
    return re.search(rf"^{name}:\w+=(ON|TRUE|1)$", cache, re.MULTILINE) is not None


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("libwinnow*.so"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", prefix, "--component", "winnow")
    return prefix


def expect_own_names_only(folder: Path) -> None:
    assert libraries(folder)
    own = re.compile(r"(winnow_|((typeinfo|typeinfo name|vtable) for )?winnow::)")
    for library in libraries(folder):
        lines = run("nm", "-DC", "--defined-only", library).splitlines()
        names = [line.split(maxsplit=2)[2] for line in lines]
        assert names and not [name for name in names if not own.match(name)]


def expect_consumers_run(built: Path, cuda: bool, mpi: bool) -> None:
    output = run(built / "consumer")
    assert f"winnow {winnow.__version__}, cuda backend: " in output
    assert ("is not in this build" in output) != cuda
    assert "key_windows: end absent: must be given" in output
    if mpi:
        assert "mpi_communicator: comm null: must be given" in run(built / "mpi_consumer")


def build_by_find_package(prefix: Path, folder: Path, cuda: bool, mpi: bool) -> None:
    components = ";".join(["cuda"] * cuda + ["mpi"] * mpi)
    settings = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DWINNOW_COMPONENTS={components}"]
    run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", folder, *settings)
    run("cmake", "--build", folder)
    expect_consumers_run(folder, cuda, mpi)


def build_by_pkg_config(prefix: Path, folder: Path, cuda: bool, mpi: bool) -> None:
    found = next(prefix.rglob("pkgconfig"))
    programs = {"consumer": "winnow"} | ({"mpi_consumer": "winnow_mpi"} if mpi else {})
    for program, package in programs.items():
        flags = run("pkg-config", "--cflags", "--libs", package, PKG_CONFIG_PATH=str(found)).split()
        source = CONSUMER / f"{program}.cc"
        command = ["g++", "-std=c++20", source, "-o", folder / program]
        run(*command, *flags, f"-Wl,-rpath,{found.parent}")
    expect_consumers_run(folder, cuda, mpi)


def test_libraries_export_names_of_winnow_alone() -> None:
    expect_own_names_only(BUILD)


def test_library_loads_without_mpi() -> None:
    assert "libmpi" not in run("ldd", BUILD / "libwinnow.so")


def test_soname_holds_the_version() -> None:
    minor = winnow.__version__.rsplit(".", 1)[0]
    assert f"[libwinnow.so.{minor}]" in run("readelf", "-d", BUILD / "libwinnow.so")


def test_consumer_finds_the_package(installed: Path, tmp_path: Path) -> None:
    cuda, mpi = option(BUILD, "WINNOW_CUDA"), option(BUILD, "WINNOW_MPI")
    build_by_find_package(installed, tmp_path, cuda, mpi)
    with pytest.raises(AssertionError, match="was built without abacus"):
        run("cmake", "-DWINNOW_COMPONENTS=abacus", tmp_path)
    build_by_pkg_config(installed, tmp_path, cuda, mpi)


def test_another_minor_version_does_not_fit(installed: Path, tmp_path: Path) -> None:
    version_file = next(installed.rglob("winnowConfigVersion.cmake"))
    script = tmp_path / "version.cmake"
    script.write_text(f'include("{version_file}")\nmessage("${{PACKAGE_VERSION_COMPATIBLE}}")\n')
    major, minor = map(int, winnow.__version__.split(".")[:2])
    for asked, fits in {minor: "TRUE", minor + 1: "FALSE"}.items():
        version = f"-DPACKAGE_FIND_VERSION={major}.{asked}"
        parts = [f"-DPACKAGE_FIND_VERSION_MAJOR={major}", f"-DPACKAGE_FIND_VERSION_MINOR={asked}"]
        assert run("cmake", version, *parts, "-P", script).strip() == fits


WAYS = {
    "fetched": ["-DWINNOW_FETCHED={root}"],
    "fetched-cuda": ["-DWINNOW_FETCHED={root}", "-DWINNOW_CUDA=ON"],
    "subdirectory-without-mpi": ["-DWINNOW_SUBDIRECTORY={root}", "-DWINNOW_MPI=OFF"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_consumer_builds_winnow_as_a_part(way: str, tmp_path: Path) -> None:
    """The folder stays, so that a second run compiles nothing again. What was built is installed
    and used from there too, which tries the installation of the cuda backend without a GPU."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    cuda = way.endswith("-cuda")
    if cuda and not Path(nvcc).exists():
        pytest.skip("no nvcc here")
    folder = ROOT / "build" / f"consumer-{way}"
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    settings += [word.format(root=ROOT) for word in WAYS[way]]
    if cuda:
        settings += ["-DCMAKE_CUDA_ARCHITECTURES=90a-real", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", folder, *settings)
    run("cmake", "--build", folder)
    mpi = option(folder, "WINNOW_MPI")
    names = {path.name for path in libraries(folder)}
    assert names == {"libwinnow.so"} | ({"libwinnow_mpi.so"} if mpi else set())
    assert not (mpi and way.endswith("without-mpi"))
    expect_own_names_only(folder)
    expect_consumers_run(folder, cuda, mpi)
    run("cmake", "--install", folder, "--prefix", tmp_path, "--component", "winnow")
    for build in (build_by_find_package, build_by_pkg_config):
        built = tmp_path / build.__name__
        built.mkdir()
        build(tmp_path, built, cuda, mpi)
    if not mpi:
        with pytest.raises(AssertionError, match="was built without mpi"):
            run("cmake", "-DWINNOW_COMPONENTS=mpi", tmp_path / build_by_find_package.__name__)
