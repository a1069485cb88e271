//! Tests of the suites, reports and plots, in one binary.

mod attention_stats;
mod babilong;
mod chance;
mod common;
mod config;
mod extrapolation;
mod flip_flop;
mod longtext_qa;
mod lookup;
mod mrcr;
mod perplexity;
mod plots;
mod ranks;
mod resume;
mod retrieval;
mod ruler;
mod symbols;
mod zero_shot;
