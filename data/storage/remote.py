"""Files below a URL that fsspec knows: s3://, gs://, abfs://, hdfs://, file://, memory:// ...

Every operation is tried again, with growing pauses, after errors that may pass: for at least MATMIX_RETRY_SECONDS (60)
and four times. Files appear whole. Clients take credentials and endpoints from the environment or from their own files.
A URL that holds a password or a key is refused, because URLs are written into configs, job scripts and logs.
"""

import contextlib
import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from matmix.data.artifacts import panics_as_errors
from matmix.data.storage.files import errors_name
from matmix.data.storage.private import private_folder

Result = TypeVar("Result")

SCRATCH_VARIABLE = "MATMIX_SCRATCH"
RETRY_VARIABLE = "MATMIX_RETRY_SECONDS"
_LEAST_ATTEMPTS = 4
# One stream does not fill the network of a node, and checkpoints are many files.
_CONCURRENT = 8
# Mistakes in a program, ours or a client's: neither repeated nor taken for the store's.
_MISTAKES = (TypeError, AttributeError, NameError, LookupError, AssertionError, NotImplementedError, ImportError)
# What no repetition changes: answers of the store, what clients raise under names of their own, and a full disk here.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_FINAL_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "DefaultCredentialsError"}
_LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_PRECONDITION_FAILED = 412
_WRITING = ("cannot write", "cannot upload")
_CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oci": "ocifs"}
# scheme://user:secret@..., where a secret may hold slashes, as those of S3 do; in host:8020/a@b the number is a port.
_SECRET = re.compile(r"://[^/@]*:[^/@]*@|://[^/@]*:(?!\d*(?:/|$))[^@]*@")
_SECRET_QUERY = re.compile(
    r"://.*[?&;](?:[^=&;]*(?:token|signature|secret|passw|credential|api[-_]?key|access[-_]?key|account[-_]?key)[^=&;]*"
    r"|sig|key)=",
    re.IGNORECASE,
)


class RemoteError(OSError):
    """A store failed at every attempt."""


class FileTooLarge(ValueError):
    """A file of a store is larger than it may be."""


class RemotePermissionError(RemoteError, PermissionError):
    """A store refused these credentials."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns True for a path that fsspec opens, False for one of the local file system."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def has_secret(text: str) -> bool:
    """Returns True where a text holds a URL with a password, a key or a signature."""
    return "://" in text and (_SECRET.search(text) is not None or _SECRET_QUERY.search(text) is not None)


def refuse_secrets(value: Any, what: str) -> None:
    """Raises ValueError (one line, without it) where a text in nested values is a URL with a secret. what: its name."""
    if isinstance(value, str) and has_secret(value):
        raise ValueError(
            f"{what}: a URL may not hold a password, key or signature, as URLs are written into runs, job scripts and "
            "logs: give it by the environment or the client's own files"
        )
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    for item in inner if isinstance(inner, list | tuple) else ():
        refuse_secrets(item, what)


def scratch_folder(kind: str, url: str) -> Path:
    """Returns this machine's folder for files of a URL, which need not exist, below MATMIX_SCRATCH or the user's cache
    folder. kind: name of the folder above it, which is made for this user alone. Raises ValueError (one line) where
    others may write there."""
    base = os.environ.get(SCRATCH_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "matmix"
    url = url.rstrip("/")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", url.rsplit("/", 1)[-1])
    try:
        folder = private_folder(Path(base) / kind, close=True)
    except ValueError as error:
        raise ValueError(f"{error}; name a folder of your own with {SCRATCH_VARIABLE}") from None
    return folder / f"{stem}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, with the kind of error unless it is a RemoteError."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return text if isinstance(error, RemoteError) else f"{type(error).__name__}: {text}"


def persist(action: Callable[[], Result], what: str, *, patient: bool = True) -> Result:
    """Returns what `action` returns, and repeats it while it fails for a reason that may pass.

    what: begins the message, as in "cannot download s3://bucket/file"; patient: False = only one attempt. Raises
    FileNotFoundError, FileExistsError, RemotePermissionError, the OSError of a full disk and mistakes in the program at
    once, and RemoteError (one line) after the last attempt.
    """
    import tenacity

    seconds = float(os.environ.get(RETRY_VARIABLE) or 60)
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: patient and not _is_final(error)),
        wait=tenacity.wait_exponential_jitter(initial=0.2, max=15, jitter=0.2),
        stop=tenacity.stop_after_attempt(_LEAST_ATTEMPTS) & tenacity.stop_after_delay(max(seconds, 0.001)),
        reraise=True,
    )
    try:
        with panics_as_errors():
            return attempts(action)
    except FileNotFoundError as error:
        missing = "there is no such bucket or folder" if what.startswith(_WRITING) else "it does not exist"
        raise FileNotFoundError(f"{what}: {missing}") from error
    except PermissionError as error:
        raise RemotePermissionError(f"{what}: {first_line(error)}") from error
    except Exception as error:  # each client raises its own kinds
        if _is_local_disk(error) or isinstance(error, (FileExistsError, FileTooLarge, *_MISTAKES)):
            raise
        if type(error).__name__ == "NoCredentialsError":
            what = f"{what} without credentials (FSSPEC_S3_ANON=true reads public buckets)"
        raise RemoteError(f"{what}: {first_line(error)}") from error


def _is_final(error: BaseException) -> bool:
    is_kind = isinstance(error, (*_FINAL, *_MISTAKES, FileTooLarge)) or not isinstance(error, Exception)
    return is_kind or type(error).__name__ in _FINAL_NAMES or _is_local_disk(error)


def _is_local_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _LOCAL


class RemoteFolder:
    """The files below one URL, by their names relative to it. Usable from threads and after a fork.

    patient: False = failed operations are not tried again. Raises ValueError where the URL has a password, or no
    client.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        refuse_secrets(url, "a folder's URL")
        self.url, self.patient = url.rstrip("/"), patient
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        """Returns the client and the folder's path as the client spells it; fsspec keeps the clients of a process."""
        import fsspec

        scheme = self.url.partition("://")[0]
        try:
            # What others write must be seen at once: no cached listings.
            options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
            client, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            hint = f"pip install {_CLIENTS[scheme]}" if scheme in _CLIENTS else first_line(error)
            raise ValueError(f"cannot use {self.url}: its client is not installed ({hint})") from None
        except ValueError as error:
            raise ValueError(f"cannot use {self.url}: {first_line(error)}") from None
        return client, path.rstrip("/")

    def _do(self, what: str, name: str, action: Callable[[Any, str], Result]) -> Result:
        def once() -> Result:
            client, path = self._connect()
            return action(client, f"{path}/{name}" if name else path)

        return persist(once, f"cannot {what} {self.url}/{name}".rstrip("/"), patient=self.patient)

    # -- reading -----------------------------------------------------------------------------------------

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns name -> bytes of every file, or of every file below the folder `prefix`. Names that climb
        ("../.bashrc") are left out, because they become paths of this machine."""

        def look(client: Any, path: str) -> dict[str, int]:
            start = len(path) - len(prefix) if prefix else len(path) + 1
            infos = client.find(path, detail=True).items()
            files = {name[start:]: int(info["size"] or 0) for name, info in infos if info["type"] == "file"}
            return {n: size for n, size in files.items() if not n.startswith("/") and ".." not in n.split("/")}

        with contextlib.suppress(FileNotFoundError):
            return self._do("list", prefix, look)
        return {}

    def read(self, name: str, largest: int | None = None) -> bytes | None:
        """Returns the content of a small file, or its first `largest` bytes; None where there is no such file."""
        # s3fs first asks for the whole file, to learn whether it should be fetched in pieces, and then again.
        whole = {"max_concurrency": 1} if self.url.startswith(("s3://", "s3a://")) else {}
        with contextlib.suppress(FileNotFoundError):
            return self._do("read", name, lambda client, path: client.cat_file(path, end=largest, **whole))
        return None

    def size(self, name: str) -> int:
        """Returns the bytes of a file. Raises FileNotFoundError, RemoteError."""
        return int(self._do("read", name, lambda client, path: client.size(path)) or 0)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file for reading from front to back. Raises FileNotFoundError, RemoteError; errors while it is read
        are the client's."""
        with self._do("read", name, lambda client, path: client.open(path, "rb")) as file:
            yield file

    def download(self, name: str, target: Path, largest: int | None = None) -> None:
        """Fetches a file of at most `largest` bytes; `target` appears whole or not at all. Raises FileNotFoundError,
        RemoteError, and FileTooLarge before anything is fetched."""
        part = target.with_name(f".{target.name}.part-{os.getpid()}-{threading.get_ident()}")
        target.parent.mkdir(parents=True, exist_ok=True)

        def fetch(client: Any, path: str) -> None:
            expected = client.size(path)
            if largest is not None and expected is not None and expected > largest:
                raise FileTooLarge(f"{self.url}/{name} has {expected:,} bytes, it may have {largest:,}")
            client.get_file(path, str(part))
            if expected is not None and (arrived := part.stat().st_size) != expected:
                raise OSError(f"{arrived} of {expected} bytes arrived")

        try:
            with errors_name(target):
                self._do("download", name, fetch)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    # -- writing -----------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file. Raises RemoteError."""
        self._put("write", name, lambda client, path: client.pipe_file(path, content))

    def upload(self, source: Path, name: str) -> None:
        """Uploads a file, which appears whole or not at all. Raises RemoteError."""
        self._put("upload", name, lambda client, path: client.put_file(str(source), path))

    def _put(self, what: str, name: str, action: Callable[[Any, str], object]) -> None:
        def put(client: Any, path: str) -> None:
            if _is_local(client):
                action(client, f"{path}.part")
                client.mv(f"{path}.part", path)
            else:
                action(client, path)

        self._do(what, name, put)

    def create(self, name: str, content: bytes) -> None:
        """Writes a small file that does not exist yet: of several processes that try, one succeeds. Raises
        FileExistsError in the others, and RemoteError. A client or store without this condition overwrites."""

        def put(client: Any, path: str) -> None:
            if _is_local(client):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                client.pipe_file(path, content, mode="create")
            except OSError as error:
                # Not every store says which condition it was; botocore and gcsfs tell the HTTP status.
                answer = (getattr(error.__cause__, "response", None) or {}).get("ResponseMetadata", {})
                if (answer.get("HTTPStatusCode") or getattr(error, "code", None)) == _PRECONDITION_FAILED:
                    raise FileExistsError(path) from error
                raise

        self._do("write", name, put)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files in the order given, and passes over missing ones."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._do("remove", name, lambda client, path: client.rm_file(path))

    # -- many files --------------------------------------------------------------------------------------

    def download_all(self, names: Iterable[str], target: Path, done: Callable[[str], object] = str) -> None:
        """Fetches files into a folder, several at a time. Raises as `download`. done: called in any thread with each
        name."""
        _each(names, lambda name: self.download(name, target / name), done)

    def upload_all(self, source: Path, names: Iterable[str], done: Callable[[str], object] = str) -> None:
        """Uploads files of a folder, several at a time. Raises as `upload` for the first that fails; done: as above."""
        _each(names, lambda name: self.upload(source / name, name), done)


def _is_local(client: Any) -> bool:
    return "file" in ((client.protocol,) if isinstance(client.protocol, str) else client.protocol)


def _each(names: Iterable[str], action: Callable[[str], object], done: Callable[[str], object]) -> None:
    """Calls `action` and `done` for every name, several at a time, and starts nothing more after the first failure."""
    from concurrent.futures import ThreadPoolExecutor

    def one(name: str) -> None:
        action(name)
        done(name)

    with ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="matmix-remote") as pool:
        list(pool.map(one, names))  # raises what one of them did
