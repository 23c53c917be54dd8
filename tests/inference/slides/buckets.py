"""A local S3 server with one empty bucket, for tests of slides in object stores."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "lab-slides"


class Bucket:
    """One bucket of a server in this process; `url` is what users would write."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.endpoint = endpoint
        self._client: Any = boto3.client("s3", endpoint_url=endpoint)
        self._client.create_bucket(Bucket=BUCKET)

    def url(self, key: str = "") -> str:
        return f"s3://{BUCKET}/{key}"

    def put(self, key: str, data: bytes | Path) -> str:
        """Upload; the object's URL."""
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data if isinstance(data, bytes) else data.read_bytes())
        return self.url(key)

    def put_tree(self, folder: Path, prefix: str) -> str:
        """Upload every file of a folder; the URL of the prefix."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
        return self.url(f"{prefix}/")

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def check_credentials(self, *, check: bool) -> None:
        """Whether the server refuses unknown keys, as ours are."""
        request = urllib.request.Request(  # noqa: S310 - a loopback address
            f"{self.endpoint}/moto-api/reset-auth",
            data=b"0" if check else b"inf",
            headers={"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310


def serve_bucket() -> Iterator[Bucket]:
    """A server with an empty bucket, stopped at the end; clients find it through the environment."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        _forget_clients()
        try:
            yield Bucket(endpoint)
        finally:
            _forget_clients()
            server.stop()


def _forget_clients() -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
