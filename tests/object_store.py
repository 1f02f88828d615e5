"""An S3 server on loopback (moto's), with one bucket, for tests of repositories elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Self

import boto3
from moto.server import ThreadedMotoServer

from deploy.local.embedded import held_port

BUCKET = "models-of-a-team"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/secret/EXAMPLEKEY",
    "AWS_DEFAULT_REGION": "eu-central-1",
}


class ObjectStore:
    """The server; `stop` and `start` make it unreachable and reachable again, with what it holds."""

    def __init__(self) -> None:
        # Its own also while it is stopped.
        self.port = held_port()
        self._server: Any = None

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.start()
        region = CREDENTIALS["AWS_DEFAULT_REGION"]
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=region,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        self.client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": region})
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is None:
            self.start()
        for key in self.names():
            self.delete(key)
        self.client.delete_bucket(Bucket=BUCKET)
        self.client.close()
        self.stop()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._server = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, folder: str = "models") -> str:
        """A repository's URL, in Triton's form with a server's address."""
        return f"s3://127.0.0.1:{self.port}/{BUCKET}/{folder}"

    def names(self) -> list[str]:
        """The keys of all objects."""
        return [one["Key"] for one in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def put(self, key: str, content: bytes | str) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def upload(self, folder: Path, prefix: str) -> None:
        """Puts the files of a folder under a prefix, each content once."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
