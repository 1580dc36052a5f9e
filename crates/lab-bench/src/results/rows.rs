//! Reads the rows of a saved document: those of a case, and medians of their values.

use serde_json::Value;

use crate::bench::document::median;

/// Some rows of a document. A value of a row is named by its key, or by a path such as
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

    /// Returns the rows in which a key has this value, in its displayed form.
    pub(super) fn with(&self, key: &str, value: &str) -> Self {
        let is = |row: &&&Value| shown(at(row, key)).as_deref() == Some(value);
        Self(self.0.iter().filter(is).copied().collect())
    }

    /// Returns all values of a key, in the order of their first occurrence.
    pub(super) fn all(&self, key: &str) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for value in self.0.iter().filter_map(|row| shown(at(row, key))) {
            if !all.contains(&value) {
                all.push(value);
            }
        }
        all
    }

    /// Returns the median of a number, over the rows that have it.
    pub(super) fn median(&self, key: &str) -> Option<f64> {
        self.median_of(|row| at(row, key)?.as_f64())
    }

    /// Returns the median of a function of the rows.
    pub(super) fn median_of(&self, value: impl Fn(&Value) -> Option<f64>) -> Option<f64> {
        median(self.0.iter().filter_map(|row| value(row)))
    }
}

/// Returns a row's value at a key or path.
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
