//! Tests of the whole model, in one binary.

mod configs;
mod costs;
mod decoding;
mod documents;
mod independent;
mod precision;
mod pruning;
mod sparsity;
mod weight_maps;
mod weights;
