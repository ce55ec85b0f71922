"""The model on CUDA: Triton kernels, sampling on the device, decode in CUDA graphs.

`kernels/` needs triton, which comes with torch's CUDA build; nothing here imports it before it is
called. Triton's interpreter runs the kernels on CPU tensors, which is how they are tested.
"""
