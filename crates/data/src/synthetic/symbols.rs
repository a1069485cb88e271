//! Tasks whose sequences are abstract symbols, and whose answers are labels at some positions.

use crate::{DataError, Tokenizer};

/// A sequence of symbols, each at least 0, with the answers at some of its positions.
///
/// The answer at a position is what a model should predict after reading the sequence up to and with that
/// position. It is not part of the sequence: the symbol that follows may be another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    /// The symbols.
    pub symbols: Vec<u32>,
    /// Positions and the symbols to predict there, by position.
    pub labels: Vec<(usize, u32)>,
}

impl Labelled {
    /// [`content`] of its symbols.
    pub fn content(&self) -> Vec<u8> {
        content(&self.symbols)
    }
}

/// The bytes that decide whether a sequence is for training or for tests.
pub fn content(symbols: &[u32]) -> Vec<u8> {
    symbols.iter().flat_map(|symbol| symbol.to_le_bytes()).collect()
}

/// Gives each symbol a token of its own: symbol n is the n-th token besides the end of text. What the
/// tokenizer makes of these tokens as text has no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SymbolTokens {
    end_of_text: u32,
}

impl SymbolTokens {
    /// Tokens for `count` symbols.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] when the tokenizer has fewer; `task` is the one that needs them.
    pub fn new(tokenizer: &Tokenizer, count: usize, task: &'static str) -> Result<Self, DataError> {
        let available = SymbolTokens::available(tokenizer);
        if count > available {
            let tokenizer = tokenizer.name().into();
            return Err(DataError::TooFewTokens { task, needed: count, available, tokenizer });
        }
        Ok(SymbolTokens { end_of_text: tokenizer.end_of_text() })
    }

    /// How many symbols a tokenizer has tokens for.
    pub fn available(tokenizer: &Tokenizer) -> usize {
        tokenizer.vocab_size() - 1
    }

    /// The token of a symbol.
    pub fn token(&self, symbol: u32) -> u32 {
        if symbol < self.end_of_text { symbol } else { symbol + 1 }
    }

    /// The tokens of a sequence.
    pub fn encode(&self, symbols: &[u32]) -> Vec<u32> {
        symbols.iter().map(|&symbol| self.token(symbol)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerConfig;

    #[test]
    fn symbols_are_tokens_without_the_end_of_text() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let tokens = SymbolTokens::new(&tokenizer, 256, "mqar").unwrap();
        assert_eq!(tokens.encode(&[0, 7, 255]), [0, 7, 255]);
        // A trained vocabulary has its end of text at 0.
        let tokens = SymbolTokens { end_of_text: 0 };
        assert_eq!(tokens.encode(&[0, 7]), [1, 8]);
        let error = SymbolTokens::new(&tokenizer, 8192, "mqar").unwrap_err();
        insta::assert_snapshot!(error, @r#"
        mqar needs 8192 tokens besides the end of text; the tokenizer bytes has 256
          hint: ask for fewer symbols, or use a tokenizer with more tokens, for example kind = "gpt2"
        "#);
    }
}
