"""Who holds which element, and where: layouts as arithmetic on integers.

What is related to what
-----------------------
A `Layout` relates three addresses of one tensor: *full*, the flat row-major index in the tensor as
if nobody had cut it; *rank*, the process that holds the element; *shard*, the flat index in what
that rank holds. It says nothing of bytes, dtypes, files or devices. Two rows of three columns, the
columns cut over three ranks and everything held by two groups of ranks, ``dp=2,tp=3``::

    full     0  1  2            rank 0   0 3       rank 3   0 3
             3  4  5            rank 1   1 4       rank 4   1 4
                                rank 2   2 5       rank 5   2 5

    [2 : 0 : 3 : 0] [3 : 1 : 1 : 0] [2 : 3 : 0 : 1]

The last line is the whole layout, one `Piece`: a nest of loops, each an `Axis` of (extent : full
stride : rank stride : shard stride), that walks the three addresses at once. The first loop goes to
the other group and stays at the same element: a *replica*. The second goes to the next rank and the
next column: the *split*. The third goes down the rows, in the full tensor and in the shard: *data*.

    >>> from restride.algebra.layout import Layout
    >>> from restride.algebra.piece import Axis, Piece
    >>> piece = Piece((Axis(2, 0, 3, 0), Axis(3, 1, 1, 0), Axis(2, 3, 0, 1)))
    >>> layout = Layout.of({"dp": 2, "tp": 3}, (2, 3), [(2, 1)] * 6, [piece])
    >>> layout.pieces(4)[0].axes, layout.pieces(4)[0].full_base
    ((Axis(extent=2, full_stride=3, rank_stride=0, shard_stride=1),), 1)

Why a rank is an address
------------------------
With one list of pieces for each rank, everything costs as much as there are ranks, and what is
regular over the ranks has to be found again by every operation. As an address, the rank needs no
rules of its own: column and row splits, grouped heads, expert placements and replicas differ in
numbers, not in kind, and matching two layouts matches all pairs of ranks in one go. An axis moves
the rank or the shard index, never both, so fixing the rank is a substitution: what
``layout.pieces(rank)`` leaves are two strided views, one of the full tensor and one of the shard.
The mesh only gives names to ranks; no arithmetic depends on them.

Which direction is a function
-----------------------------
From (rank, shard) to full: an address in a shard holds one element, or it is declared `Padding`.
Not from full to (rank, shard), since an element may be held many times; so who holds it is derived,
by `holders`, and which holder is read is the planner's decision. The walk itself favours no side:
loops give all three addresses by adding strides, and where one address is known, solving for the
loops gives the others. `join` does that for two walks at once.

That shard to full is a function, and that it is onto, are the two sides of `prove`. A `Gap` is a
shard address without a value, an `Overlap` one with two. A `Hole` is an element that nobody holds.
Nothing is asked of the other properties: replicas make the function not injective, and are legal in
whatever way they are cut. Building a layout checks only that every address is inside its tensor;
layouts with holes and overlaps can be built, and `prove` shows where they are.

What can be done with it
------------------------
=============  ====================================================================================
`canonical`    one way of writing for everything that was cut along mixed radices
`signature`    identity: the same for every way of writing
`coverage`     `prove` both sides, with a witness; `holders`, the exact sets of replicas
`compose`      two layouts of one tensor give the `transfer` of all pairs of ranks;
               `chain` cuts shards once more: ZeRO over tensor parallelism
`fold`         index maps, as running a partition gives them, into pieces
`serial`       JSON map files
=============  ====================================================================================

Integers and `Fraction` in, values out. Nothing walks elements: costs depend on the number of pieces
and axes, not on extents. `restride.testing.oracles` says the same things by walking every element.

What it is not
--------------
A CuTe layout is a function from coordinates to one address, a mode has one stride; an axis here has
three, so a layout is a relation and needs no inverse. A placement of DTensor names the dimension
that a mesh axis splits: shorter where it suffices, with no words for fused or permuted weights. An
affine piece of DeepSpeed's universal checkpoints is a walk on one rank: `Piece.at_rank` gives such.
An expert placement that follows no arithmetic is listed, and costs what it is. Sums, averages,
requantisation and whatever depends on values are operations between layouts, and no layouts.
"""
