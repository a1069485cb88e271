//! Sizes, shapes and names on the command line of `longwall bench`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use longwall_bench::decode::MOST_TOKENS;
use longwall_bench::ops::Operation;
use longwall_config::parse_count;

/// The shape of an attention operation.
pub fn kernel_shape(text: &str) -> Result<[usize; 4], String> {
    parse_shape(text, "batch, heads, seq_len and head_dim", "4,16,4096,128")
}

/// The shape of a linear layer's product.
pub fn gemm_shape(text: &str) -> Result<[usize; 3], String> {
    parse_shape(text, "tokens, outputs and inputs", "65536,3072,768")
}

/// N sizes, called `names`, separated by commas.
fn parse_shape<const N: usize>(
    text: &str,
    names: &str,
    example: &str,
) -> Result<[usize; N], String> {
    let size = |text: &str| text.trim().parse().ok().filter(|size| (1..=u32::MAX).contains(size));
    let sizes: Option<Vec<_>> = text.split(',').map(|n| size(n).map(|n| n as usize)).collect();
    sizes.and_then(|sizes| sizes.try_into().ok()).ok_or_else(|| {
        format!(
            "`{text}` is no shape; allowed: {names}, whole numbers from 1 to {}, for example {example}",
            u32::MAX
        )
    })
}

/// A number of tokens, such as 32k.
pub fn parse_context(text: &str) -> Result<usize, String> {
    match parse_count(text)? {
        tokens @ 1..=MOST_TOKENS => Ok(tokens as usize),
        _ => Err(format!("`{text}` is out of range; allowed: from 1 to {MOST_TOKENS} tokens")),
    }
}

/// Two increasing numbers.
pub fn parse_range(text: &str) -> Result<[f64; 2], String> {
    let numbers = text.split(',').map(|x| x.trim().parse::<f64>().ok());
    match numbers.collect::<Option<Vec<_>>>().as_deref() {
        Some(&[low, high]) if low < high && low.is_finite() && high.is_finite() => Ok([low, high]),
        _ => Err(format!("`{text}` is no range; allowed: two numbers that rise, for example 0,10")),
    }
}

/// The name of an operation.
pub fn parse_operation() -> impl TypedValueParser<Value = Operation> {
    let names = Operation::ALL.iter().map(|operation| operation.name());
    PossibleValuesParser::new(names).map(|name| {
        let known = Operation::ALL.iter().find(|operation| operation.name() == name);
        *known.expect("the parser allows the names of operations alone")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_as_many_numbers() {
        let parse = |text: &str| parse_shape::<3>(text, "tokens, outputs and inputs", "4,3,2");
        assert_eq!(parse("65536,3072, 768"), Ok([65_536, 3072, 768]));
        for bad in ["", "1,2", "1,2,3,4", "1,2,x", "0,2,3", "-1,2,3", "4294967296,1,1"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("is no shape; allowed: tokens, outputs and inputs"), "{error}");
            assert!(error.ends_with("for example 4,3,2"), "{error}");
        }
    }

    #[test]
    fn a_range_is_two_numbers_that_rise() {
        assert_eq!(parse_range("-1, 2.5"), Ok([-1.0, 2.5]));
        for bad in ["", "1", "2,1", "1,1", "0,inf", "nan,1", "1,2,3", "a,b"] {
            assert!(parse_range(bad).unwrap_err().contains("is no range"), "{bad}");
        }
    }

    #[test]
    fn contexts_have_a_range() {
        assert_eq!(parse_context("32k"), Ok(32_000));
        assert!(parse_context("0").unwrap_err().contains("from 1 to"));
        assert!(parse_context("17M").is_err() && parse_context("x").is_err());
    }
}
