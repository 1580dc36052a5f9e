//! Tests the client against faulty agents: answers that are too large, too slow, truncated, or
//! missing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_api::{
    ANSWER_BYTES_MAX, Client, ClientError, EVENT_LINE_BYTES_MAX, ErrorCode, WATCH_LINE_BYTES_MAX,
    What,
};
use std::path::PathBuf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

/// Starts an agent that answers every request with the same bytes, and returns a client of it.
fn agent(folder: &tempfile::TempDir, answer: Vec<u8>) -> Client {
    let path: PathBuf = folder.path().join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut head = vec![0; 4096];
                let _ = stream.read(&mut head).await;
                // The client stops reading an answer that is too large.
                let _ = stream.write_all(&answer).await;
            });
        }
    });
    Client::unix(path)
}

fn http(status: u16, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut answer =
        format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n").into_bytes();
    answer.extend_from_slice(content);
    answer
}

#[tokio::test]
async fn an_answer_that_is_too_long_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let client = agent(&folder, http(200, &vec![b' '; ANSWER_BYTES_MAX + 1]));
    let error = client.guests().await.unwrap_err();
    assert!(matches!(error, ClientError::Nonsense { .. }), "{error}");
    assert_eq!(error.exit_code(), 5);
}

#[tokio::test]
async fn an_error_that_is_not_the_apis_own_is_named_by_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let client = agent(&folder, http(502, b"<html>"));
    let error = client.guests().await.unwrap_err();
    assert!(error.to_string().contains("502"), "{error}");
}

#[tokio::test]
async fn the_apis_errors_are_given_whole() {
    let folder = tempfile::tempdir().unwrap();
    let text = br#"{"code":"guest_busy","message":"m","hint":"h","state_of_guest":null}"#;
    let client = agent(&folder, http(409, text));
    let error = client.cancel("7f").await.unwrap_err();
    let ClientError::Api(api) = &error else {
        panic!("{error}");
    };
    assert_eq!(api.code, ErrorCode::GuestBusy);
    assert_eq!(error.hint().as_deref(), Some("h"));
}

#[tokio::test]
async fn a_watch_ends_at_nonsense_at_a_long_line_and_at_a_cut() {
    for (lines, expected) in [
        (b"{}\n".to_vec(), "makes no sense"),
        (vec![b'x'; 2 * WATCH_LINE_BYTES_MAX], "too long"),
        (b"{\"id\":\"7f\"".to_vec(), "went away"),
        (Vec::new(), "went away"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut answer = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n".to_vec();
        answer.extend_from_slice(&lines);
        let mut watch = agent(&folder, answer).watch("7f").await.unwrap();
        let error = watch.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(watch.next().await.is_none(), "it is over");
    }
}

#[tokio::test]
async fn events_end_at_nonsense_at_a_long_line_and_at_a_cut_and_unknown_ones_are_skipped() {
    let later = "{\"sequence\":1,\"unix_ms\":1,\"event\":\"eclipse\"}\n";
    let current = "{\"sequence\":2,\"unix_ms\":1,\"event\":\"current\"}\n";
    let begin = format!("{later}{current}");
    for (then, expected) in [
        (b"{}\n".to_vec(), "makes no sense"),
        (vec![b'x'; 2 * EVENT_LINE_BYTES_MAX], "too long"),
        (b"{\"sequence\":3".to_vec(), "stopped telling of events"),
        (Vec::new(), "stopped telling of events"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut answer = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n".to_vec();
        answer.extend_from_slice(begin.as_bytes());
        answer.extend_from_slice(&then);
        let mut events = agent(&folder, answer).events().await.unwrap();
        let event = events.next().await.unwrap().unwrap();
        assert_eq!((event.sequence, event.what), (2, What::Current {}));
        let error = events.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(events.next().await.is_none(), "it is over");
    }
}
