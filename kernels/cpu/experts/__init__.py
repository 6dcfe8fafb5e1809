"""Routed experts on the CPU: `routing` chooses, `operation` computes, by the steps in the other files.

`sorting` orders the pairs of row and expert, `grouped` multiplies each expert's rows, `forms` is what stands between
the two products, `combine` adds up a row's outputs; `gradients` is the way back.
"""
