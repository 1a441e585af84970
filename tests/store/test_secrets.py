"""AU-1, SE-1: the private signing key on disk."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from headrace.errors import SetupError
from headrace.store.secrets import SIGNING_KEY_FILE, load_or_create_signing_key, replace_signing_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "secrets"


def test_it_is_made_once_and_private(folder: Path) -> None:
    first = load_or_create_signing_key(folder)
    assert load_or_create_signing_key(folder).kid == first.kid
    assert [file.name for file in folder.iterdir()] == [SIGNING_KEY_FILE]
    assert stat.S_IMODE((folder / SIGNING_KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_crash_while_it_was_made_is_no_trouble(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / f".{SIGNING_KEY_FILE}.new").write_bytes(b"half a k")
    assert load_or_create_signing_key(folder).kid == load_or_create_signing_key(folder).kid
    assert [file.name for file in folder.iterdir()] == [SIGNING_KEY_FILE]


def test_rotation_replaces_it(folder: Path) -> None:
    first = load_or_create_signing_key(folder)
    second = replace_signing_key(folder)
    assert second.kid != first.kid
    assert load_or_create_signing_key(folder).kid == second.kid


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_wider_permissions_are_refused(folder: Path, mode: int) -> None:
    load_or_create_signing_key(folder)
    path = folder / SIGNING_KEY_FILE
    path.chmod(mode)
    with pytest.raises(SetupError, match=rf"{mode:04o}.*chmod 600"):
        load_or_create_signing_key(folder)
    path.chmod(0o600)
    assert load_or_create_signing_key(folder).kid


def test_a_folder_open_to_others_is_refused(folder: Path) -> None:
    load_or_create_signing_key(folder)
    folder.chmod(0o755)
    with pytest.raises(SetupError, match="chmod 700"):
        load_or_create_signing_key(folder)


def other_kind() -> bytes:
    return Ed448PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", other_kind()]
)
def test_a_damaged_file_is_refused_and_left_alone(folder: Path, content: bytes) -> None:
    load_or_create_signing_key(folder)
    path = folder / SIGNING_KEY_FILE
    path.write_bytes(content)
    with pytest.raises(SetupError, match=r"damaged|another kind"):
        load_or_create_signing_key(folder)
    assert path.read_bytes() == content


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    load_or_create_signing_key(folder)
    path = folder / SIGNING_KEY_FILE
    os.rename(path, tmp_path / "elsewhere.pem")
    path.symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(SetupError, match="cannot use the signing key"):
        load_or_create_signing_key(folder)


def test_a_folder_in_its_place_is_refused(folder: Path) -> None:
    (folder / SIGNING_KEY_FILE).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    with pytest.raises(SetupError, match=r"cannot use|not a regular file"):
        load_or_create_signing_key(folder)
