//! Pages of a column, checked before their values are decoded.

use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};

/// Refuses dictionaries that claim more values than their bytes can hold: the decoder would reserve
/// memory for all of them.
pub(super) struct CheckedPages(pub(super) Box<dyn PageReader>);

/// Bytes before every value of a dictionary of byte arrays.
const LENGTH_BYTES: usize = 4;

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.0.get_next_page()?;
        if let Some(Page::DictionaryPage { buf, num_values, .. }) = &page
            && *num_values as usize > buf.len() / LENGTH_BYTES
        {
            return Err(ParquetError::General(format!(
                "a dictionary of {} bytes says it has {num_values} values",
                buf.len()
            )));
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.0.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.0.at_record_boundary()
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
