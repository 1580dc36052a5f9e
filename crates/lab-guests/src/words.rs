//! Reads what programs print.

use longhaul_lab::error::LabError;
use longhaul_lab::product::Finished;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses a document.
pub(crate) fn parse<T: DeserializeOwned>(what: &str, text: &str) -> Result<T, LabError> {
    serde_json::from_str(text).map_err(|error| LabError::Answer {
        what: what.to_owned(),
        message: format!("{error}: {}", text.trim()),
    })
}

/// Returns the reasons in an error of the product's, one for each.
pub(crate) fn reasons(out: &str, err: &str) -> Vec<String> {
    let documents = out.lines().chain([out]).chain(err.lines()).chain([err]);
    let mut messages = documents.filter_map(|text| {
        let document: Value = serde_json::from_str(text).ok()?;
        error_message(&document)
    });
    let message = messages.next().unwrap_or_else(|| err.trim().to_owned());
    split(&message)
}

/// Returns why a move did not complete.
pub(crate) fn of_move(finished: &Finished) -> Vec<String> {
    let documents = finished.said.iter();
    let mut messages =
        documents.filter_map(|text| error_message(&serde_json::from_str(text).ok()?));
    match messages.next() {
        Some(message) => split(&message),
        None => vec![finished.why()],
    }
}

/// Returns the message of a document `{"error": {...}}`, with its hint.
fn error_message(document: &Value) -> Option<String> {
    let error = document.get("error")?;
    let message = error.get("message")?.as_str()?;
    let hint = error.get("hint").and_then(Value::as_str);
    Some(match hint {
        Some(hint) => format!("{message} (hint: {hint})"),
        None => message.to_owned(),
    })
}

/// Returns the entries of a list of reasons, or the whole message.
pub(crate) fn split(message: &str) -> Vec<String> {
    let entries = message.lines().filter_map(|line| line.strip_prefix("- "));
    let entries: Vec<String> = entries.map(str::to_owned).collect();
    match entries.is_empty() {
        true => vec![message.lines().map(str::trim).collect::<Vec<_>>().join(" ")],
        false => entries,
    }
}

#[cfg(test)]
mod tests {
    use super::reasons;

    #[test]
    fn an_error_has_one_reason_or_a_list() {
        let one = r#"{"error":{"message":"no","hint":"ask"}}"#;
        assert_eq!(reasons(one, ""), ["no (hint: ask)"]);
        let list = r#"{"error":{"message":"it cannot move:\n- a TPM\n- a folder"}}"#;
        assert_eq!(reasons("", list), ["a TPM", "a folder"]);
        assert_eq!(reasons("", "error: torn\n"), ["error: torn"]);
    }
}
