//! Tables in files.

use super::text::about;
use candle_core::Result;
use std::path::Path;

/// Writes comma-separated values; a cell with a comma, a quote or a line break is quoted.
///
/// # Errors
/// When the file cannot be written; the message names it.
pub fn write_csv(
    path: &Path,
    header: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> Result<()> {
    let header = header.iter().map(|cell| cell.to_string()).collect();
    let mut text = String::new();
    for row in std::iter::once(header).chain(rows) {
        let cells: Vec<String> = row.into_iter().map(quoted).collect();
        text += &cells.join(",");
        text.push('\n');
    }
    std::fs::write(path, text).map_err(|error| about(path, error))
}

fn quoted(cell: String) -> String {
    match cell.contains([',', '"', '\n']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_with_commas_and_quotes_are_quoted() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("table.csv");
        let rows = [["a, b", "1"], ["say \"c\"", "2"]];
        let rows = rows.map(|row| row.map(String::from).to_vec());
        write_csv(&path, &["name", "number"], rows)?;
        let text = std::fs::read_to_string(&path)?;
        assert_eq!(text, "name,number\n\"a, b\",1\n\"say \"\"c\"\"\",2\n");
        let missing = Path::new("no such folder/table.csv");
        let error = write_csv(missing, &["name"], []).unwrap_err().to_string();
        assert!(error.contains("no such folder"), "{error}");
        Ok(())
    }
}
