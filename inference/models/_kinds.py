"""Which class serves a spec."""

from inference.models.bulk_rna import BulkRnaServerModel
from inference.models.heads import EmbeddingHead
from inference.models.segmentation import SegmentationServerModel
from inference.models.server_model import BaseServerModel
from inference.models.spec import ModelSpec


def class_for(spec: ModelSpec) -> type[BaseServerModel]:
    """The class that loads a checkpoint of this spec."""
    if spec.omics is not None:
        return BulkRnaServerModel
    if spec.mask is not None:
        return SegmentationServerModel
    return BaseServerModel if spec.head is None else EmbeddingHead
