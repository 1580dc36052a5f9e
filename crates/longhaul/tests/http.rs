//! Tests the API on a real socket: its routes against its description, and input that is wrong, too
//! large, or not HTTP.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, configuration, free_address};
use longhaul_api::{
    Client, ClientError, ErrorCode, Event, Events, Migration, Operation, Outcome,
    REQUEST_BYTES_MAX, ReservedBy, StartGuest, What,
};
use longhaul_engine::handover::{Record, Side};
use longhaul_protocol::{Attempt, Generation, HostId, MigrationId};
use longhaul_storage::{Journal, Journals};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Performs one exchange, byte for byte; returns the answer up to the end of the connection.
fn exchange(agent: &Agent, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(agent.socket()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // A request that is too large may be refused before it is written completely.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn request(agent: &Agent, method: &str, path: &str, body: &str) -> (u16, Value) {
    let length = body.len();
    let answer = exchange(
        agent,
        format!(
            "{method} {path} HTTP/1.1\r\nhost: agent\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
        .as_bytes(),
    );
    let status = answer
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("{method} {path}: {answer}"));
    let (_, content) = answer.split_once("\r\n\r\n").unwrap();
    let content = serde_json::from_str(content).unwrap_or(Value::Null);
    (status.parse().unwrap(), content)
}

#[test]
fn the_served_description_is_the_committed_one() {
    let agent = Agent::start();
    let (status, served) = request(&agent, "GET", "/v1/openapi.json", "");
    assert_eq!(status, 200);
    let committed = include_str!("../../api/openapi.json");
    let committed: Value = serde_json::from_str(committed).unwrap();
    assert!(served == committed, "see the tests of longhaul-api");
}

#[test]
fn every_route_is_described_and_everything_described_is_routed() {
    let agent = Agent::start();
    let document = longhaul_api::openapi();
    let mut described = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            described += 1;
            if path == Operation::WatchEvents.path() {
                // Its answer has no end: other tests read it.
                continue;
            }
            let path = path.replace("{host}", "x").replace("{guest}", "x");
            let path = path.replace("{migration}", "00");
            let (status, answer) = request(&agent, &method.to_uppercase(), &path, "");
            let code = answer["code"].as_str().unwrap_or_default();
            assert!(
                !["route_unknown", "method_not_allowed"].contains(&code),
                "{method} {path}: {status} {answer}"
            );
        }
        // The reverse: undescribed methods are not answered.
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH"] {
            if item.get(method.to_lowercase()).is_none() {
                let (status, answer) = request(&agent, method, path, "");
                assert_eq!(status, 405, "{method} {path}: {answer}");
                assert_eq!(answer["code"], "method_not_allowed");
            }
        }
    }
    assert_eq!(described, Operation::ALL.len());
    for path in [
        "/",
        "/v1",
        "/v1/",
        "/v2/host",
        "/v1/host/",
        "/v1/hosts/a/b/c",
    ] {
        let (status, answer) = request(&agent, "GET", path, "");
        assert_eq!(status, 404, "{path}");
        assert_eq!(answer["code"], "route_unknown", "{path}");
        assert!(answer["hint"].as_str().unwrap().contains("openapi.json"));
    }
}

#[test]
fn wrong_requests_are_refused_in_words() {
    let agent = Agent::start();
    for (method, path, body, status, code) in [
        ("POST", "/v1/hosts", "", 400, "invalid_request"),
        ("POST", "/v1/hosts", "{", 400, "invalid_request"),
        ("POST", "/v1/hosts", "[]", 400, "invalid_request"),
        (
            "POST",
            "/v1/hosts",
            r#"{"name":"a"}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/guests",
            r#"{"name":"a","extra":1}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/guests",
            r#"{"name":"../../etc"}"#,
            404,
            "guest_unknown",
        ),
        (
            "POST",
            "/v1/guests",
            r#"{"description":"name = 7"}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/plans",
            r#"{"guest":"a","to":"b","downtime_ms":0}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/plans",
            r#"{"guest":"a","to":"b","downtime_ms":-1}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/plans",
            r#"{"guest":"a","to":"b"}"#,
            404,
            "guest_unknown",
        ),
        (
            "POST",
            "/v1/migrations",
            r#"{"guest":"a","to":"b","bandwidth_bps":7}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/hosts/x/probe",
            r#"{"seconds":1000}"#,
            400,
            "invalid_request",
        ),
        ("POST", "/v1/hosts/x/probe", "", 404, "host_unknown"),
        ("DELETE", "/v1/hosts/x", "", 404, "host_unknown"),
        ("GET", "/v1/migrations/%00%ff", "", 400, "invalid_request"),
        ("GET", "/v1/migrations/%00", "", 404, "migration_unknown"),
        ("GET", "/v1/guests/%2e%2e%2f", "", 404, "guest_unknown"),
        (
            "PUT",
            "/v1/migrations/00/limit",
            r#"{"bandwidth_bps":"x"}"#,
            400,
            "invalid_request",
        ),
    ] {
        let (found, answer) = request(&agent, method, path, body);
        assert_eq!(found, status, "{method} {path} {body}: {answer}");
        assert_eq!(answer["code"], code, "{method} {path} {body}: {answer}");
        assert!(
            answer["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
    }
}

#[test]
fn too_much_and_garbage_end_the_connection_and_nothing_else() {
    let agent = Agent::start();
    let large = "x".repeat(REQUEST_BYTES_MAX + 1);
    let (status, answer) = request(&agent, "POST", "/v1/hosts", &large);
    assert_eq!(
        (status, answer["code"].as_str()),
        (413, Some("request_too_large"))
    );

    // A length that is only claimed is refused as well, without waiting for the content.
    let claimed = exchange(
        &agent,
        b"POST /v1/hosts HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
          content-length: 99999999999\r\n\r\n",
    );
    assert!(claimed.starts_with("HTTP/1.1 413"), "{claimed}");

    // So is a request that never ends.
    let mut endless =
        b"POST /v1/hosts HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..40 {
        endless.extend_from_slice(b"2000\r\n");
        endless.extend_from_slice(&[b' '; 0x2000]);
        endless.extend_from_slice(b"\r\n");
    }
    let answer = exchange(&agent, &endless);
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");

    let long_head = format!(
        "GET /v1/host HTTP/1.1\r\nx: {}\r\n\r\n",
        "y".repeat(1 << 20)
    );
    let answer = exchange(&agent, long_head.as_bytes());
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
        &[0; 4096],
        b"\r\n\r\n\r\nGET\r\n\r\n",
    ] {
        let answer = exchange(&agent, garbage);
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
            "{answer}"
        );
    }
    let (status, _) = request(&agent, "GET", "/v1/host", "");
    assert_eq!(status, 200, "the agent goes on");
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Starts an agent with the API on TCP; returns its address and the file of the token.
fn start_with_tcp(folder: &Path) -> (Agent, String, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let token = folder.join("token");
    std::fs::write(&token, format!("{TOKEN}\n")).unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let address = free_address();
    let agent = Agent::start_with(&format!(
        "api.tcp = {{ listen = {address:?}, token_file = {token:?} }}"
    ));
    (agent, address, token)
}

fn ask(address: &str, certificate: &Path, token: &Path) -> std::process::Output {
    command(address, certificate, token, "host")
}

fn command(address: &str, certificate: &Path, token: &Path, name: &str) -> std::process::Output {
    common::command(Path::new("/nonexistent"))
        .args(["--json", "--api", address, name, "--api-certificate"])
        .arg(certificate)
        .arg("--api-token-file")
        .arg(token)
        .output()
        .unwrap()
}

#[test]
fn strangers_do_not_keep_out_who_has_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, address, token) = start_with_tcp(folder.path());
    let certificate = agent.folder.path().join("state/api-certificate.pem");
    // Each of these may take 10 s to say something.
    let strangers: Vec<_> = (0..400)
        .map(|_| std::net::TcpStream::connect(&address).unwrap())
        .collect();
    let began = Instant::now();
    let output = ask(&address, &certificate, &token);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    drop(strangers);
}

#[test]
fn over_tcp_there_is_tls_and_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, address, token) = start_with_tcp(folder.path());
    let certificate = agent.folder.path().join("state/api-certificate.pem");
    let output = ask(&address, &certificate, &token);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let host: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(host["name"], "lyon-1");
    assert_eq!(host["api_listen"], address);

    let wrong = folder.path().join("wrong");
    std::fs::write(&wrong, "0123456789abcdef0123456789abcdeX").unwrap();
    let output = ask(&address, &certificate, &wrong);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("token"));
    let output = command(&address, &certificate, &wrong, "events");
    assert_eq!(output.status.code(), Some(3), "a stream needs it too");

    // Another certificate than the copied one: nothing is sent.
    let other = Agent::start_with(&format!(
        "api.tcp = {{ listen = {:?}, token_file = {token:?} }}",
        free_address()
    ));
    let others = other.folder.path().join("state/api-certificate.pem");
    let output = ask(&address, &others, &token);
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("certificate"), "{text}");

    // Without TLS nothing is answered.
    let mut plain = std::net::TcpStream::connect(&address).unwrap();
    plain.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = plain.write_all(b"GET /v1/host HTTP/1.1\r\nhost: a\r\n\r\n");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1"));
}

#[test]
fn the_client_gives_the_agents_errors() {
    let agent = Agent::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = Arc::new(Client::unix(agent.socket()));
    runtime.block_on(async {
        assert!(client.openapi().await.unwrap() == longhaul_api::openapi());
        let error = client.guest("web-7").await.unwrap_err();
        assert!(matches!(&error, ClientError::Api(api) if api.code == ErrorCode::GuestUnknown));
        assert_eq!(error.exit_code(), 3);
        let Err(error) = client.watch("7f").await else {
            panic!("there is no such migration");
        };
        assert!(matches!(&error, ClientError::Api(api) if api.code == ErrorCode::MigrationUnknown));
    });
}

/// Writes the journal of a guest that was released to a host of which nothing is known: its
/// migration is in doubt.
fn write_journal(state: &Path) {
    let attempt = Attempt(1);
    let migration = MigrationId([0x7f; 8]);
    let journals = Journals::open(&state.join("journal")).unwrap();
    let mut journal = Journal::open(&journals, migration).unwrap();
    let began = Record::Began {
        migration,
        attempt,
        side: Side::Source,
        guest: "web-7".into(),
        generation: Generation(6),
        peer: HostId([7; 32]),
        peer_name: "paris-2".into(),
        paused: false,
    };
    let generation = Generation(7);
    let released = Record::Released {
        attempt,
        generation,
    };
    journal.append(&began).unwrap();
    journal.append(&released).unwrap();
}

async fn next(events: &mut Events) -> Event {
    let event = tokio::time::timeout(LIMIT, events.next()).await;
    event.unwrap().unwrap().unwrap()
}

/// Returns the next change, and its number.
async fn change(events: &mut Events) -> (u64, What) {
    loop {
        let Event { sequence, what, .. } = next(events).await;
        if what != (What::Current {}) {
            return (sequence, what);
        }
    }
}

fn is_unreachable(migration: &Migration) -> bool {
    let doubt = migration.doubt.as_ref();
    doubt.is_some_and(|doubt| doubt.reachable == Some(false))
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_the_present_state_and_then_its_changes() {
    let mut agent = Agent::start_configured(|folder| {
        write_journal(&folder.join("state"));
        configuration(folder, "")
    });
    let client = Client::unix(agent.socket());
    let mut events = client.events().await.unwrap();
    let first = next(&mut events).await;
    assert_eq!(first.what, What::Snapshot { lagged: false });
    let reserved = |guest: &str, by, migration: Option<&str>| What::GuestReserved {
        guest: guest.to_owned(),
        by,
        migration: migration.map(str::to_owned),
    };
    let second = next(&mut events).await;
    let by = ReservedBy::Migration;
    let id = "7f7f7f7f7f7f7f7f";
    assert_eq!(second.what, reserved("web-7", by, Some(id)));
    let third = next(&mut events).await;
    let What::Migration { mut migration } = third.what else {
        panic!("{third:?}");
    };
    assert_eq!(migration.outcome, Some(Outcome::InDoubt));
    assert!(migration.doubt.is_some() && migration.id == id);
    let fourth = next(&mut events).await;
    assert_eq!(fourth.what, What::Current {});
    let sequences = [first.sequence, second.sequence, third.sequence];
    assert_eq!(sequences, [fourth.sequence; 3]);

    // The agent asks for the other host until it is trusted here.
    let mut last = fourth.sequence;
    while !is_unreachable(&migration) {
        let (sequence, What::Migration { migration: now }) = change(&mut events).await else {
            panic!("another change");
        };
        assert!(sequence > last && *now != *migration);
        (last, migration) = (sequence, now);
    }
    // A guest is reserved while its start is tried, and fails.
    let description = "name = \"db-1\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\n\
                       vcpus = 1\nmemory_mib = 128\n";
    let start = StartGuest::Description(description.to_owned());
    client.start_guest(&start).await.unwrap_err();
    let expected = [
        reserved("db-1", ReservedBy::Agent, None),
        What::GuestReleased {
            guest: "db-1".to_owned(),
        },
    ];
    let mut expected = expected.into_iter().peekable();
    while let Some(what) = expected.peek() {
        let (sequence, told) = change(&mut events).await;
        assert!(sequence > last);
        last = sequence;
        // The other host may be asked again meanwhile.
        if !matches!(told, What::Migration { .. }) {
            assert_eq!(told, *what);
            expected.next();
        }
    }
    // Without changes that is said.
    while next(&mut events).await.what != (What::Current {}) {}

    // A stream does not keep the agent from stopping, and ends with it.
    assert!(agent.end(Signal::SIGTERM).success(), "{}", agent.log());
    let error = loop {
        match events.next().await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    // A stream that was cut off ends in the middle of its answer.
    let text = error.to_string();
    assert!(text.contains("it stopped telling of events"), "{text}");
}

#[test]
fn streams_take_the_room_of_connections() {
    let agent = Agent::start();
    let open = || {
        let mut stream = UnixStream::connect(agent.socket()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
            .write_all(b"GET /v1/events HTTP/1.1\r\nhost: a\r\n\r\n")
            .unwrap();
        stream
    };
    let mut streams: Vec<_> = (0..128).map(|_| open()).collect();
    for stream in &mut streams {
        let mut begin = [0; 15];
        stream.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200 OK");
    }
    let mut waiting = open();
    waiting.set_nonblocking(true).unwrap();
    let early = waiting.read(&mut [0; 1]).unwrap_err();
    assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock);
    waiting.set_nonblocking(false).unwrap();
    drop(streams.pop());
    let mut begin = [0; 15];
    waiting.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
}
