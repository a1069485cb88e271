//! Decodes a document's text from what a reader has read. This part runs in parallel.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value;

use super::{Format, InputFile, Inputs, MOST_DOCUMENT_BYTES, read_document};
use crate::DataError;

/// The byte order mark that some editors put before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A document as it was read, not yet decoded.
#[derive(Debug)]
pub struct Document {
    /// Index of its input file.
    pub input: usize,
    /// What was read.
    pub payload: Payload,
    /// If set, decides the split instead of the text, so that related documents stay together.
    pub group: Option<String>,
}

/// What was read of a document.
#[derive(Debug)]
pub enum Payload {
    /// Nothing yet: the whole input file is the document.
    File,
    /// The text.
    Text(Vec<u8>),
    /// A JSON object that has the text in one of its fields.
    Json {
        /// The object.
        object: Vec<u8>,
        /// The field.
        field: Arc<str>,
        /// The line of the file, from 1.
        line: u64,
    },
}

/// The result of decoding a document.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded<T> {
    /// It has text.
    Document(T),
    /// It has no text, or only white space.
    Empty,
    /// It is binary data, in a file that the user did not name.
    Binary,
}

/// A document's text.
#[derive(Debug, PartialEq, Eq)]
pub struct DecodedText {
    /// The text.
    pub text: String,
    /// Whether bytes that are not UTF-8 were replaced.
    pub replaced: bool,
}

impl Document {
    /// Bytes of memory that the document takes, at most, once it is decoded.
    pub(crate) fn weight(&self, inputs: &Inputs) -> u64 {
        match &self.payload {
            Payload::File => inputs.files[self.input].bytes,
            Payload::Text(bytes) | Payload::Json { object: bytes, .. } => bytes.len() as u64,
        }
    }

    /// Reads and decodes the text.
    pub(crate) fn text(self, inputs: &Inputs) -> Result<Decoded<DecodedText>, DataError> {
        let file = &inputs.files[self.input];
        let bytes = match self.payload {
            Payload::File => {
                let raw = std::fs::File::open(&file.path)
                    .map_err(|source| DataError::read(&file.path, source))?;
                read_document(raw, file, MOST_DOCUMENT_BYTES)?
            }
            Payload::Text(bytes) => bytes,
            Payload::Json { object, field, line } => {
                json_text(file, line, &object, &field)?.into_bytes()
            }
        };
        if file.format == Format::Plain && bytes.iter().take(8192).any(|&byte| byte == 0) {
            return if file.named {
                Err(DataError::Binary { path: file.path.clone() })
            } else {
                Ok(Decoded::Binary)
            };
        }
        let bytes = match bytes.strip_prefix(BYTE_ORDER_MARK) {
            Some(rest) => rest.to_vec(),
            None => bytes,
        };
        let text = match String::from_utf8(bytes) {
            Ok(text) => DecodedText { text, replaced: false },
            Err(error) => {
                let lossy = String::from_utf8_lossy(error.as_bytes());
                DecodedText { replaced: matches!(lossy, Cow::Owned(_)), text: lossy.into_owned() }
            }
        };
        if text.text.trim().is_empty() { Ok(Decoded::Empty) } else { Ok(Decoded::Document(text)) }
    }
}

fn json_text(file: &InputFile, line: u64, json: &[u8], field: &str) -> Result<String, DataError> {
    let fail = |reason: String, hint: &str| DataError::JsonLine {
        path: file.path.clone(),
        line,
        reason,
        hint: hint.into(),
    };
    let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
    let record = serde_json::from_slice(json.trim_ascii()).map_err(|error| {
        // The parser's own line number counts from this line.
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or_default();
        let reason = format!("not valid JSON at column {}: {what}", error.column());
        fail(
            reason,
            "every line must hold one JSON object; rename the file to .txt if it is plain text",
        )
    })?;
    let Value::Object(mut record) = record else {
        return Err(fail(
            "the line is JSON, but no object".into(),
            "every line must hold one JSON object",
        ));
    };
    match record.remove(field) {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Null) => Ok(String::new()),
        Some(other) => {
            let shown: String = other.to_string().chars().take(40).collect();
            Err(fail(
                format!("{field:?} is {shown}, not a text"),
                "set text_field (--text-field) to the field that holds the text",
            ))
        }
        None => {
            let mut keys: Vec<&str> = record.keys().map(String::as_str).collect();
            keys.sort_unstable();
            let reason = format!("the record has no field {field:?}; it has {}", keys.join(", "));
            Err(fail(reason, "set text_field (--text-field) to the field that holds the text"))
        }
    }
}
