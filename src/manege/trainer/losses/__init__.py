"""What is minimised per trained token: tensors in, tensors out, a file per idea, put together by `combine`.

Shape legend of all files: M trained tokens of a micro-batch, flat. `call_M` tells which call (its index within the
micro-batch) sampled a token; calls are whole, since a call's answer is one span of one sample.
"""
