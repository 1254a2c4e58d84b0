"""The text layer: between the strings callers see and the token ids the engine works on.

`Tokenizer` reads a checkpoint's tokenizer and chat template; `IncrementalDetokenizer` and
`StopMatcher` turn a stream of tokens back into a stream of text. Façades, server and command line
use it; the engine's core does not know that it exists. It needs `tokenizers` and `jinja2`, no
torch and no transformers, whose results it reproduces.
"""

from infer.text.chat_template import ChatTemplate
from infer.text.detokenizer import IncrementalDetokenizer
from infer.text.stop import StopMatcher
from infer.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "Tokenizer"]
