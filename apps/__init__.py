"""Models to train: each a short script with build(batch_size), data() and OPTIONS.

`build` returns a Model, `data` the two splits of a data set: what is trained on and what is held
out, each with `x` and `y`. Their sizes have one name everywhere:

batch_size: samples of a step. count: samples of a synthetic data set, held-out ones among them.
image_size: rows, and columns, of an image. classes: how many there are; the width of the logits.
layers: how many stand on top of each other. hidden: the width between layers. inner: the width
inside a block's dense layers. heads: of attention. dropout: the rate at which elements are dropped.
length: words or steps of a sequence. vocabulary: words that there are, each an id below it.
vocabularies: the rows of each table of categories. bag: ids of one table in an event. dense:
features that are numbers. inputs: the width of each input, by name. width: of a table's rows, or of
the first convolution. bottom, top: the widths of dense layers before and after what is between
them. narrow: a divisor of all inner channels, for tests. squeeze: channels in the middle of a
module.
"""
