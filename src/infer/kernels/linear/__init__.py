"""`Linear`: y = gate(W norm(x) + b) + residual, with the weight in the machine's fastest layout.

`make_linear` makes the layers of all models. The original weight may be freed afterwards. A weight
is held in the dtype of the activations, in int8 or in int4. In int8 each output has one scale, and
each row of activations has one scale that is computed with the row; the sum of products is an exact
integer. Weights and activations are rotated before (`rotated`, and csrc/linear.h on why). A weight
may also be given in the blocks of a GGUF file (`kernels.blocks`), which are kept. int4 makes such
blocks of 4 bits of the weight itself (`kernels.blocks.fitted`).

Whether a row's result is the same, bit for bit, for every number of rows depends on the class. It
is by construction in `NativeLinear` (bfloat16, int8 and blocks in C++: csrc/linear.h), in
`Int8Linear` and in `CudaInt8Linear`. It was observed to be in most of `PackedLinear` (oneDNN). It
is not in `PlainLinear` (`F.linear`). `kernels.invariance` checks it for a model on this machine.
"""
