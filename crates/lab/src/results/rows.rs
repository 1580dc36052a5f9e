//! Reading the rows of a saved document: those of a case, and medians of what they hold.

use serde_json::Value;

use crate::bench::document::median;

/// Some rows of a document. What a row holds is named by its key, or by a path such as
/// `parameters/dirty_rate_of_link`.
#[derive(Debug, Clone, Default)]
pub(super) struct Rows<'a>(pub(super) Vec<&'a Value>);

impl<'a> Rows<'a> {
    pub(super) fn of(rows: &'a [Value]) -> Self {
        Self(rows.iter().collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those rows in which something has this value, as it is shown.
    pub(super) fn with(&self, key: &str, value: &str) -> Self {
        let is = |row: &&&Value| shown(at(row, key)).as_deref() == Some(value);
        Self(self.0.iter().filter(is).copied().collect())
    }

    /// All values of something, in the order in which they come first.
    pub(super) fn all(&self, key: &str) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for value in self.0.iter().filter_map(|row| shown(at(row, key))) {
            if !all.contains(&value) {
                all.push(value);
            }
        }
        all
    }

    /// The median of a number, of the rows that have it.
    pub(super) fn median(&self, key: &str) -> Option<f64> {
        self.median_of(|row| at(row, key)?.as_f64())
    }

    /// The median of what rows give.
    pub(super) fn median_of(&self, value: impl Fn(&Value) -> Option<f64>) -> Option<f64> {
        median(self.0.iter().filter_map(|row| value(row)))
    }
}

/// What a row holds at a key or path.
pub(super) fn at<'a>(row: &'a Value, key: &str) -> Option<&'a Value> {
    row.pointer(&format!("/{key}"))
}

fn shown(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_chosen_by_what_they_hold() {
        let rows = [
            json!({"system": "a", "more": {"rate": 0.5}, "ms": 1.0}),
            json!({"system": "b", "more": {"rate": 0.5}, "ms": 9.0}),
            json!({"system": "a", "more": {"rate": 1}, "ms": 3.0}),
            json!({"system": "a", "ms": null}),
        ];
        let rows = Rows::of(&rows);
        assert_eq!(rows.all("system"), ["a", "b"]);
        assert_eq!(rows.all("more/rate"), ["0.5", "1"]);
        assert_eq!(rows.with("system", "a").median("ms"), Some(2.0));
        assert_eq!(rows.with("more/rate", "0.5").median("ms"), Some(5.0));
        assert_eq!(rows.with("system", "c").median("ms"), None);
    }
}
