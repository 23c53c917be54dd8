"""RNA, masks and heads over the wire: as JSON, and as binary batches that hold the same values in little room."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from inference.clients import HttpClient
from inference.errors import BadRequest, InferenceError, NonFiniteOutput, UnknownModel
from inference.models.heads import DownstreamHeadModel
from inference.models.sample import TileOutput
from inference.models.server_model import BaseServerModel, load_server_model
from tests.inference.clients.doubles import ask
from tests.inference.models.conftest import TinyNet, tiny_spec
from tests.inference.models.kinds import (
    TPM,
    HeadNet,
    PlaneNet,
    RnaNet,
    export_portable,
    flat,
    head_spec,
    make_request,
    make_spec,
    rna_spec,
)

if TYPE_CHECKING:
    from tests.inference.clients.doubles import StartService

GREY = 51
"""A tile of this value has the embedding 51, or 0.2 of 255."""


def found(row: TileOutput | InferenceError) -> TileOutput:
    assert isinstance(row, TileOutput), row
    return row


class Clients:
    """Clients of one application, by model."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._made: list[HttpClient] = []

    def __getitem__(self, model: str) -> HttpClient:
        self._made.append(HttpClient("http://service", model, max_retries=0, transport=httpx.ASGITransport(self.app)))
        return self._made[-1]

    def close(self) -> None:
        for client in self._made:
            client.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[BaseServerModel]:
    folder = tmp_path_factory.mktemp("kinds")
    mask = {"size": 4, "values": "probability", "threshold": 0.5}
    one = make_spec("one", mask=mask, prediction_names=("tissue",))
    three = make_spec("three", mask=mask, prediction_names=("a", "b", "c"))
    backbone = load_server_model(export_portable(TinyNet(), tiny_spec(), folder))
    heads = {
        name: export_portable(HeadNet(*weights), head_spec(name, *outputs), folder).path
        for name, weights, outputs in (("first", (1.0,), ("sum",)), ("second", (2.0, 3.0), ("double", "triple")))
    }
    return [
        load_server_model(export_portable(RnaNet(), rna_spec(), folder)),
        load_server_model(export_portable(PlaneNet(1), one, folder)),
        load_server_model(export_portable(PlaneNet(3), three, folder)),
        DownstreamHeadModel(backbone, heads),
    ]


@pytest.fixture
def clients(serve: "StartService", models: list[BaseServerModel]) -> Iterator[Clients]:
    made = Clients(serve(models, max_wait_ms=0))
    yield made
    made.close()


# RNA.


def test_tiles_of_a_binary_batch_refer_to_registered_rna(clients: Clients) -> None:
    client, tiles = clients["rna"], np.stack([flat(GREY), flat(7), flat(102)])
    digest = client.register_bulk_rna(TPM)
    rows = client.run_tiles(tiles, "prediction_with_embedding", rna_sha256=digest)
    assert [type(row) for row in rows] == [TileOutput, NonFiniteOutput, TileOutput]
    for value, row in ((GREY, rows[0]), (102, rows[2])):
        body = make_request(flat(value), bulk_rna_sha256=digest).model_dump_json()
        alone = json.loads(client.predict_with_embedding(body))
        prediction, embedding = found(row).prediction, found(row).embedding
        assert prediction is not None
        assert embedding is not None
        np.testing.assert_allclose(prediction, alone["output"], rtol=1e-6)
        np.testing.assert_allclose(embedding, alone["embedding"], rtol=1e-6)
        assert alone["lineage"]["bulk_rna_sha256"] == digest
    without = found(client.run_tiles(tiles[:1], "prediction")[0]).prediction
    assert without is not None
    with_rna = found(rows[0]).prediction
    assert with_rna is not None
    assert not np.allclose(without, with_rna)


def test_rna_that_was_never_registered_is_refused_for_the_whole_batch(clients: Clients) -> None:
    with pytest.raises(BadRequest, match="no bulk RNA is registered as 000000000000"):
        clients["rna"].run_tiles(flat(GREY)[None], "prediction", rna_sha256="0" * 64)
    with pytest.raises(BadRequest, match="bulk RNA has 1 values"):
        clients["rna"].register_bulk_rna([1.0])


# Masks.


@pytest.mark.parametrize(("name", "n_classes"), [("one", 1), ("three", 3)])
def test_a_mask_is_the_same_pixel_by_pixel_as_json_and_packed(clients: Clients, name: str, n_classes: int) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    client = clients[name]
    alone = json.loads(client.predict(make_request(tile).model_dump_json()))["output"]
    row = found(client.run_tiles(tile[None], "prediction")[0])
    assert row.mask is not None
    assert (row.mask.n_classes, row.mask.shape) == (n_classes, (4, 4))
    assert row.mask.unpack().ravel().tolist() == alone
    assert len(set(alone)) == max(2, n_classes)
    assert row.prediction is not None
    np.testing.assert_allclose(row.prediction.sum(), 1 if n_classes > 1 else np.mean(alone), atol=1e-6)


# Heads.


def test_each_head_answers_under_its_own_name_whichever_way_it_is_asked(clients: Clients) -> None:
    tile = flat(GREY)
    for name, expected in (("first", [153.0]), ("second", [306.0, 459.0])):
        client = clients[name]
        np.testing.assert_allclose(json.loads(client.predict(make_request(tile).model_dump_json()))["output"], expected)
        invoked = make_request(tile, model_name=name, mode="prediction").model_dump_json()
        answer = ask(clients.app, "POST", "/invocations", invoked).json()
        np.testing.assert_allclose(answer["output"], expected)
        assert answer["lineage"]["model_name"] == name
        prediction = found(client.run_tiles(tile[None], "prediction")[0]).prediction
        assert prediction is not None
        np.testing.assert_allclose(prediction, expected)
    with pytest.raises(UnknownModel, match="no model 'third' here"):
        clients["third"].predict(make_request(tile).model_dump_json())
