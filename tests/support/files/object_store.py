"""A real S3-compatible server (moto's) in the test's process, which can be stopped, started again and made to fail."""

from __future__ import annotations

import contextlib
import io
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from werkzeug.serving import BaseWSGIServer, make_server


class ObjectStore:
    """The server and one bucket of its own. `refuse` decides which requests get HTTP 500 as their answer."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._application = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._port = 0
        self.refuse: Callable[[str, str], bool] = lambda method, path: False
        self.requests: list[tuple[str, str]] = []
        self.names_conditions = True
        """Whether the answer to a write whose condition does not hold names the condition, as not every store does."""
        self.bucket = f"bucket-{uuid.uuid4().hex[:12]}"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def environment(self) -> dict[str, str]:
        """What a process needs to use the store. One layer of retries, ours, so that tests take no minutes."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "an-access-key-id",
            "AWS_SECRET_ACCESS_KEY": "a-secret-access-key",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "MATMIX_RETRY_SECONDS": "0",
        }

    def start(self) -> None:
        """Starts to answer, after a stop with everything that was stored before."""
        self._server = self._bind()
        self._server.log_startup = lambda: None
        self._server.RequestHandlerClass.log_request = lambda *_: None
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def _bind(self) -> BaseWSGIServer:
        # Below the ports that the system hands out, so that no connection takes ours while we are stopped; drawn from
        # the system, as training seeds Python's generator and the tests' processes would all draw the same ones.
        # After a stop the same one again: connections that are just being closed may hold it for a moment.
        ports = [self._port] * 100 if self._port else random.SystemRandom().sample(range(20_000, 32_000), 50)
        for port in ports:
            with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):  # how it says "in use"
                return make_server("127.0.0.1", port, self._answer, threaded=True)
            time.sleep(0.1)
        raise OSError(f"no free port for the object store among {ports}")

    def stop(self) -> None:
        """From now on connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.refuse(method, path):
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"]
        answer = self._application(environ, start_response)
        if not self.names_conditions:
            answer = [part.replace(b"Condition>", b"Something>") for part in answer]
        return answer

    # -- what is stored, past all retries and caches -------------------------------------------------------

    def _client(self):
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def make_bucket(self) -> None:
        self._client().create_bucket(Bucket=self.bucket)

    def names(self, prefix: str = "") -> list[str]:
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        return self._client().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self._client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self._client().delete_object(Bucket=self.bucket, Key=key)

    def fail(self, times: int, *, method: str = "PUT", part: str = "") -> None:
        """The next so many requests of a method whose path holds `part` are refused."""
        left = threading.Semaphore(times)
        self.refuse = lambda m, path: m == method and part in path and left.acquire(blocking=False)


@contextlib.contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A store that this process's S3 clients use, with an empty bucket."""
    store = ObjectStore()
    store.start()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        store.make_bucket()
        yield store
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        store.stop()
