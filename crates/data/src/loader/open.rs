//! Opens the sources of a configuration.

use super::documents::Documents;
use super::windows::{Order, Windows};
use super::{Loader, Plan, SourceRows, SourceSummary, Split};
use crate::mixture::{BLOCK_ROWS, Mixture, derive_key, largest_remainder};
use crate::shard::TokenStream;
use crate::sources::{OpenContext, SourceData};
use crate::{DataConfig, DataError, Progress, Tokenizer};

pub(super) fn open(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    seed: u64,
    split: Split,
    progress: &dyn Progress,
) -> Result<Loader, DataError> {
    let (mut sources, mut summaries, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut without = Vec::new();
    for (at, source) in config.sources.iter().enumerate() {
        let (kind, seed) = (source.kind(), derive_key("source", &[seed, at as u64]));
        let context = OpenContext { kind, data: config, tokenizer, split, seed, progress };
        let name = format!("data.sources[{at}] ({kind})");
        match open_rows(name, source.source().open(&context)?, &context)? {
            Opened::Rows(rows, summary) => {
                sources.push(rows);
                summaries.push(summary);
                weights.push(source.weight());
            }
            Opened::TooShort { name, tokens } => {
                without.push(format!("{name} has {tokens} tokens for it"))
            }
        }
    }
    if sources.is_empty() {
        return Err(DataError::NoValidation { sources: without.join(", ") });
    }
    for source in &without {
        tracing::warn!("validation leaves out a source: {source}");
    }
    let plan = match split {
        Split::Train => train_plan(&weights, seed, &mut summaries),
        Split::Validation => validation_plan(config, &weights, &mut sources, &mut summaries),
    };
    Ok(Loader {
        seq_len: config.seq_len,
        rows: config.rows,
        seed,
        document_mask: config.document_mask,
        end_of_text: tokenizer.end_of_text() as i32,
        tokenizer: tokenizer.clone(),
        sources,
        summaries,
        weights,
        plan,
    })
}

fn train_plan(weights: &[f64], seed: u64, summaries: &mut [SourceSummary]) -> Plan {
    let mixture = Mixture::new(weights, seed);
    for (at, summary) in summaries.iter_mut().enumerate() {
        summary.share = mixture.rows_in_block(at) as f64 / BLOCK_ROWS as f64;
    }
    Plan::Train(mixture)
}

/// Divides the rows of a pass among the sources by weight; a source with fewer rows gives all of them.
fn validation_plan(
    config: &DataConfig,
    weights: &[f64],
    sources: &mut [SourceRows],
    summaries: &mut [SourceSummary],
) -> Plan {
    let rows = (config.validation_tokens / config.seq_len as u64).max(1);
    let mut starts = vec![0];
    for (at, mut share) in largest_remainder(weights, rows).into_iter().enumerate() {
        if let Some(rows) = summaries[at].rows {
            share = share.min(rows);
            summaries[at].rows = Some(share);
        }
        match &mut sources[at] {
            SourceRows::Windows(windows) => windows.spread(share),
            SourceRows::Documents(documents) => documents.spread(share),
            SourceRows::Generated(_) => {}
        }
        starts.push(starts[at] + share);
    }
    let total = starts[sources.len()].max(1);
    for (at, summary) in summaries.iter_mut().enumerate() {
        summary.share = (starts[at + 1] - starts[at]) as f64 / total as f64;
    }
    Plan::Validation(starts)
}

enum Opened {
    Rows(SourceRows, SourceSummary),
    /// A validation split without a single row.
    TooShort {
        name: String,
        tokens: u64,
    },
}

/// The rows of an opened source; divides a stream of tokens into windows or documents.
fn open_rows(
    name: String,
    content: SourceData,
    context: &OpenContext<'_>,
) -> Result<Opened, DataError> {
    let summary = |name, tokens, rows, fingerprint| {
        let (kind, share) = (context.kind, 0.0);
        SourceSummary { name, kind, tokens, rows, share, fingerprint }
    };
    let stream = match content {
        SourceData::Stream(stream) => stream,
        SourceData::Generated { rows, fingerprint } => {
            let summary = summary(name, None, None, fingerprint);
            return Ok(Opened::Rows(SourceRows::Generated(rows), summary));
        }
    };
    let order = match context.split {
        Split::Train => Order::Shuffled { key: context.seed },
        Split::Validation => Order::Spread { rows: 1 },
    };
    if context.data.rows.are_documents() {
        let tokens = stream.tokens();
        let documents = Documents::new(stream, context.tokenizer, order)?;
        if documents.count() == 0 {
            return too_short(name, tokens, 2, context.split);
        }
        if !documents.separated() {
            let rows = context.data.rows;
            return Err(DataError::NoDocuments { source_name: name, tokens, rows });
        }
        log_use(&name, &documents, context);
        let fingerprint = documents.stream.fingerprint()?;
        let summary = summary(name, Some(tokens), Some(documents.count()), fingerprint);
        return Ok(Opened::Rows(SourceRows::Documents(documents), summary));
    }
    let needed = context.data.seq_len as u64 + 1;
    if stream.tokens() < needed {
        return too_short(name, stream.tokens(), needed, context.split);
    }
    warn_without_documents(&name, &stream, context)?;
    let windows = Windows::new(stream, context.data.seq_len, context.tokenizer, order);
    let (tokens, fingerprint) = (windows.stream.tokens(), windows.stream.fingerprint()?);
    let summary = summary(name, Some(tokens), Some(windows.count), fingerprint);
    Ok(Opened::Rows(SourceRows::Windows(windows), summary))
}

/// Says how many tokens of the documents and of their rows carry a loss.
fn log_use(name: &str, documents: &Documents, context: &OpenContext<'_>) {
    let (count, seq_len) = (documents.count(), context.data.seq_len);
    let (targets, all) = (documents.targets(seq_len), documents.stream.tokens());
    tracing::info!(
        "{name}, {}: {count} documents of {all} tokens; a loss is on {targets}, {:.1} % of the {} tokens of their \
         rows",
        context.split.name(),
        100.0 * targets as f64 / (count * seq_len as u64) as f64,
        count * seq_len as u64
    );
}

/// Warns if documents cannot be separated: shards from other programs may end them differently.
fn warn_without_documents(
    name: &str,
    stream: &TokenStream,
    context: &OpenContext<'_>,
) -> Result<(), DataError> {
    let mut head = vec![0; stream.tokens().min(1 << 20) as usize];
    stream.read(0, &mut head)?;
    let end_of_text = context.tokenizer.end_of_text() as i32;
    if context.data.document_mask && !head.contains(&end_of_text) {
        tracing::warn!(
            source = name,
            "no end of text among the first {} tokens: document_mask has no effect there",
            head.len()
        );
    }
    Ok(())
}

fn too_short(name: String, tokens: u64, needed: u64, split: Split) -> Result<Opened, DataError> {
    if split == Split::Validation {
        return Ok(Opened::TooShort { name, tokens });
    }
    Err(DataError::TooShort {
        source_name: name,
        split: split.name(),
        tokens,
        needed,
        hint: "give more text, lower data.seq_len, or lower data.validation_fraction".into(),
    })
}
