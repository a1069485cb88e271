//! Whole numbers on the command line.

use std::ops::RangeInclusive;

/// A parser of whole numbers in `allowed`, whose error names these.
pub fn whole<T: TryFrom<u64>>(
    allowed: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| allowed.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            format!("allowed: a whole number from {} to {}", allowed.start(), allowed.end())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_in_its_range() {
        let size = whole::<usize>(1..=16);
        assert_eq!(size("16"), Ok(16));
        for bad in ["0", "-1", "17", "a", "1k", "", "1.5", "99999999999999999999"] {
            assert_eq!(size(bad).unwrap_err(), "allowed: a whole number from 1 to 16", "{bad}");
        }
        assert!(whole::<u16>(0..=u64::MAX)("65536").is_err());
    }
}
