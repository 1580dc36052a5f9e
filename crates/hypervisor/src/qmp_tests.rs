//! Tests the QMP client against a misbehaving QEMU.

use super::*;
use std::future::Future;
use tempfile::TempDir;
use tokio::net::UnixListener;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7},
    "package": "test"}, "capabilities": ["oob"]}}"#;
/// A time limit long enough never to decide a test that should succeed.
const PATIENCE: Duration = Duration::from_secs(60);
/// A time limit for calls that shall time out.
const SHORT: Duration = Duration::from_millis(200);

/// The other side of the socket.
struct Peer {
    lines: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Peer {
    async fn send(&mut self, text: &str) {
        let line = text.replace('\n', " ") + "\r\n";
        self.raw(line.as_bytes()).await;
    }

    async fn raw(&mut self, bytes: &[u8]) {
        // The client may have gone by then, which a test sees on its side.
        let _ = self.writer.write_all(bytes).await;
    }

    async fn command(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn greet(&mut self) {
        self.send(GREETING).await;
        let command = self.command().await;
        assert_eq!(command["execute"], "qmp_capabilities");
        self.answer(&command, json!({})).await;
    }

    async fn answer(&mut self, command: &Value, value: Value) {
        let answer = json!({"return": value, "id": command["id"]});
        self.send(&answer.to_string()).await;
    }
}

/// Starts a peer that runs `script` with its first client, and returns its socket.
fn peer<F>(script: impl FnOnce(Peer) -> F + Send + 'static) -> (TempDir, PathBuf)
where
    F: Future<Output = ()> + Send,
{
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, writer) = stream.into_split();
        let lines = BufReader::new(reader);
        script(Peer { lines, writer }).await;
    });
    (folder, path)
}

async fn forever() {
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn answers_and_events_arrive() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let command = peer.command().await;
        assert_eq!(command["execute"], "query-name");
        assert!(command.get("arguments").is_none());
        peer.send(
            r#"{"event": "STOP", "data": {"a": 1}, "future": [],
                "timestamp": {"seconds": 10, "microseconds": 5}}"#,
        )
        .await;
        peer.answer(&command, json!({"name": "web-7"})).await;
        let command = peer.command().await;
        assert_eq!(command["arguments"]["command-line"], "info ramblock");
        peer.answer(&command, json!("text\r\n")).await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let mut events = qmp.events();
    assert_eq!(qmp.version().to_string(), "7.2.22");
    let name = qmp.query("query-name").await.unwrap();
    assert_eq!(name["name"], "web-7");
    let event = events.recv().await.unwrap();
    assert_eq!(event.name, "STOP");
    assert_eq!(event.data["a"], 1);
    assert_eq!(event.at, Duration::from_micros(10_000_005));
    assert_eq!(
        qmp.hmp("info ramblock", PATIENCE).await.unwrap(),
        "text\r\n"
    );
    assert!(!qmp.is_closed());
}

#[tokio::test]
async fn answers_out_of_order_find_their_command() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let commands = [
            peer.command().await,
            peer.command().await,
            peer.command().await,
        ];
        for command in commands.iter().rev() {
            peer.answer(command, command["execute"].clone()).await;
        }
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let (a, b, c) = tokio::join!(qmp.query("a"), qmp.query("b"), qmp.query("c"));
    assert_eq!(a.unwrap(), "a");
    assert_eq!(b.unwrap(), "b");
    assert_eq!(c.unwrap(), "c");
}

#[tokio::test]
async fn a_refusal_carries_qemus_words() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let id = peer.command().await["id"].clone();
        let error = json!({"class": "CommandNotFound", "desc": "The command x has not been found"});
        peer.send(&json!({"error": error, "id": id}).to_string())
            .await;
        let id = peer.command().await["id"].clone();
        peer.send(&json!({"id": id}).to_string()).await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let error = qmp.query("x").await.unwrap_err();
    assert!(error.is_unknown_command());
    assert_eq!(
        error.to_string(),
        "QEMU refused `x`: The command x has not been found"
    );
    let error = qmp.query("y").await.unwrap_err();
    assert!(matches!(error, QmpError::Refused { .. }), "{error}");
}

#[tokio::test]
async fn a_late_answer_is_dropped_and_the_connection_lives() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let late = peer.command().await;
        let next = peer.command().await;
        peer.answer(&late, json!("late")).await;
        peer.answer(&next, json!("next")).await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let error = qmp.execute("slow", json!({}), SHORT).await.unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    assert_eq!(qmp.query("next").await.unwrap(), "next");
    assert!(qmp.connection.shared.state().pending.is_empty());
}

#[tokio::test]
async fn a_peer_that_dies_in_an_answer_fails_all_who_wait() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let first = peer.command().await;
        peer.command().await;
        peer.raw(format!("{{\"id\": {}, \"retu", first["id"]).as_bytes())
            .await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let (a, b) = tokio::join!(qmp.query("a"), qmp.query("b"));
    for error in [a.unwrap_err(), b.unwrap_err()] {
        assert!(
            error.to_string().contains("in the middle of a message"),
            "{error}"
        );
    }
    qmp.closed().await;
    let error = qmp.query("later").await.unwrap_err();
    assert!(matches!(error, QmpError::Closed { .. }), "{error}");
}

#[tokio::test]
async fn a_socket_that_is_silent_is_held_by_another_client() {
    // This listener never accepts, as QEMU does while it has a client.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = Qmp::connect(&path, SHORT).await.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("another client holds this guest's QMP socket"),
        "{error}"
    );
}

#[tokio::test]
async fn nobody_on_the_socket_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let error = Qmp::connect(&folder.path().join("none"), SHORT)
        .await
        .unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn events_before_the_greeting_are_passed_over() {
    let (_folder, path) = peer(|mut peer| async move {
        for _ in 0..3 {
            peer.send(
                r#"{"event": "VSERPORT_CHANGE", "timestamp": {"seconds": 1, "microseconds": 5}}"#,
            )
            .await;
        }
        peer.greet().await;
        let command = peer.command().await;
        peer.answer(&command, json!({"name": "web-7"})).await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    assert_eq!(qmp.query("query-name").await.unwrap()["name"], "web-7");
    let (_folder, path) = peer(|mut peer| async move {
        loop {
            peer.send(r#"{"event": "STOP"}"#).await;
            tokio::task::yield_now().await;
        }
    });
    let error = Qmp::connect(&path, PATIENCE).await.unwrap_err();
    assert!(matches!(error, QmpError::NotQmp { .. }), "{error}");
}

#[tokio::test]
async fn what_does_not_greet_as_qmp_is_refused() {
    for greeting in ["SSH-2.0-OpenSSH", "{}", "[]", r#"{"QMP": {"version": {}}}"#] {
        let (_folder, path) = peer(move |mut peer| async move {
            peer.send(greeting).await;
            forever().await;
        });
        let error = Qmp::connect(&path, PATIENCE).await.unwrap_err();
        assert!(
            matches!(error, QmpError::NotQmp { .. }),
            "{greeting}: {error}"
        );
    }
    let (_folder, path) = peer(|peer| async move { drop(peer) });
    let error = Qmp::connect(&path, PATIENCE).await.unwrap_err();
    assert!(matches!(error, QmpError::NotQmp { .. }), "{error}");
}

#[tokio::test]
async fn garbage_ends_the_connection_and_says_so() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        peer.command().await;
        peer.raw(b"\xff\xfe{nonsense\n").await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let error = qmp.query("x").await.unwrap_err();
    assert!(error.to_string().contains("which is not QMP"), "{error}");
}

#[tokio::test]
async fn unknown_messages_and_blank_lines_are_passed_over() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let command = peer.command().await;
        for line in ["", "{}", r#"{"id": "text"}"#, r#"{"id": 99, "return": {}}"#] {
            peer.send(line).await;
        }
        peer.send(r#"{"error": {"class": "GenericError", "desc": "no id"}}"#)
            .await;
        peer.answer(&command, json!(1)).await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    assert_eq!(qmp.query("x").await.unwrap(), 1);
}

#[tokio::test]
async fn an_endless_line_ends_the_connection() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        peer.command().await;
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..=LINE_BYTES_MAX >> 20 {
            peer.raw(&piece).await;
        }
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let error = qmp.execute("x", json!({}), PATIENCE).await.unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
}

#[tokio::test]
async fn a_peer_that_does_not_read_times_out() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let big = json!({"text": "x".repeat(4 << 20)});
    let error = qmp.execute("big", big, SHORT).await.unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn too_many_commands_at_once_are_refused() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        forever().await;
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    let waiting: Vec<_> = (0..PENDING_MAX)
        .map(|_| {
            let qmp = qmp.clone();
            tokio::spawn(async move { qmp.execute("x", json!({}), PATIENCE).await })
        })
        .collect();
    while qmp.connection.shared.state().pending.len() < PENDING_MAX {
        tokio::task::yield_now().await;
    }
    let error = qmp.query("one more").await.unwrap_err();
    assert!(error.to_string().contains("256 commands wait"), "{error}");
    waiting.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn the_last_clone_closes_the_socket() {
    let (gone, went) = oneshot::channel();
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        let mut rest = Vec::new();
        peer.lines.read_to_end(&mut rest).await.unwrap();
        let _ = gone.send(rest);
    });
    let qmp = Qmp::connect(&path, PATIENCE).await.unwrap();
    drop(qmp.clone());
    assert!(!qmp.is_closed());
    drop(qmp);
    assert_eq!(went.await.unwrap(), b"");
}

#[tokio::test(start_paused = true)]
async fn questions_wait_while_qemu_answers_others() {
    let (_folder, path) = peer(|mut peer| async move {
        peer.greet().await;
        for _ in 0..4 {
            let command = peer.command().await;
            tokio::time::sleep(QUESTION_TIMEOUT * 3 / 4).await;
            peer.answer(&command, json!(7)).await;
        }
        forever().await;
    });
    let qmp = Qmp::connect(&path, QUESTION_TIMEOUT * 10).await.unwrap();
    let asked = Instant::now();
    let ask = || qmp.ask("query-name", json!({}));
    let (first, second, third, fourth, fifth) = tokio::join!(ask(), ask(), ask(), ask(), ask());
    for answer in [first, second, third, fourth] {
        assert_eq!(answer.unwrap(), json!(7));
    }
    let error = fifth.unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    assert_eq!(asked.elapsed().as_secs(), 4 * QUESTION_TIMEOUT.as_secs());
}
