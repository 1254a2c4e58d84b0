"""`infer.cells`: an explicit batch of tokens over a cache of cells that the caller manages.

    model = load_model()                        # a CellModel; None: the model that ships
    context = Context(model, num_cells=4096, max_seqs=8)
    context.decode(Batch.of(tokens))            # DecodeStatus.DONE
    context.logits_ith(-1)                      # [V] float32

docs/cells.md has the worked picture, and a table of llama.cpp's names.
"""

from infer.cells.batch import Batch
from infer.cells.cell_model import CellModel, load_model
from infer.cells.cell_table import CellRecord, CellStatus
from infer.cells.decode_context import Context, DecodeStatus
from infer.cells.row_sampling import RowSampling, sample

__all__ = [
    "Batch",
    "CellModel",
    "CellRecord",
    "CellStatus",
    "Context",
    "DecodeStatus",
    "RowSampling",
    "load_model",
    "sample",
]
