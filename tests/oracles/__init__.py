"""NumPy float64 transcriptions of every method, slow and obvious, one parameter at a time.

Layout, declared once: a parameter has axes d_1..d_N after its axes of size one are squeezed; its
gradient G becomes g = vec(G), row-major, of length D = d_1 * ... * d_N; a matrix with Kronecker
factors is `np.kron(F_1, np.kron(F_2, ...))`, the order that a row-major vec asks for; curvature H
is always the dense D x D matrix. Nothing here uses a mode product or a shortcut formula.
"""
