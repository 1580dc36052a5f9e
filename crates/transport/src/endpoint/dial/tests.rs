//! Tests dialling in parallel: the order of attempts on a virtual clock, and with real endpoints.

use super::*;
use crate::endpoint::Endpoint;
use crate::endpoint::tests::{Host, LONG, host, pair, trust};
use std::net::UdpSocket as StdSocket;
use std::sync::Mutex;
use tokio::net::UdpSocket;
use tokio::sync::watch;

/// What an attempt of a simulated race does.
#[derive(Clone, Copy)]
enum Does {
    Answer(u64),
    Fail(u64),
    Refuse(u64),
    Nothing,
}

/// Runs a race of IPv4 addresses on a virtual clock, and returns its result and when each attempt
/// began and was dropped before its end, in milliseconds.
async fn simulated(
    does: &[Does],
    worked: Option<SocketAddr>,
) -> (
    Result<SocketAddr, Failures<&'static str>>,
    Vec<(u16, u64)>,
    usize,
) {
    let addresses: Vec<String> = (0..does.len())
        .map(|i| format!("10.0.0.1:{}", i + 1))
        .collect();
    let start = Instant::now();
    let (began, open) = (Mutex::new(Vec::new()), Mutex::new(0));
    let race = Race {
        worked,
        resolve_within: LONG,
        is_final: |error: &&str| *error == "refused",
        attempt: |address: SocketAddr| {
            let at = start.elapsed().as_millis() as u64;
            began.lock().unwrap().push((address.port(), at));
            let what = does[usize::from(address.port()) - 1];
            let open = &open;
            async move {
                *open.lock().unwrap() += 1;
                let (ms, result) = match what {
                    Does::Answer(ms) => (ms, Ok(())),
                    Does::Fail(ms) => (ms, Err("failed")),
                    Does::Refuse(ms) => (ms, Err("refused")),
                    Does::Nothing => std::future::pending().await,
                };
                tokio::time::sleep(Duration::from_millis(ms)).await;
                *open.lock().unwrap() -= 1;
                result
            }
        },
    };
    let result = race.run(Candidates::configured(&addresses)).await;
    let result = result.map(|(candidate, ())| candidate.address);
    let open = *open.lock().unwrap();
    (result, began.into_inner().unwrap(), open)
}

#[tokio::test(start_paused = true)]
async fn attempts_are_staggered_and_the_first_answer_wins() {
    use Does::{Answer, Nothing};
    let (result, began, cancelled) = simulated(&[Nothing, Answer(400), Answer(10)], None).await;
    assert_eq!(result.ok().unwrap().port(), 3);
    assert_eq!(began, [(1, 0), (2, 250), (3, 500)]);
    assert_eq!(cancelled, 2);
}

#[tokio::test(start_paused = true)]
async fn a_failure_starts_the_next_attempt_at_once() {
    use Does::{Answer, Fail, Nothing};
    let (result, began, _) = simulated(&[Fail(20), Fail(0), Nothing, Answer(5)], None).await;
    assert_eq!(result.ok().unwrap().port(), 4);
    assert_eq!(began, [(1, 0), (2, 20), (3, 20), (4, 270)]);
}

#[tokio::test(start_paused = true)]
async fn what_worked_last_is_dialled_first() {
    use Does::{Answer, Nothing};
    let worked = Some("10.0.0.1:2".parse().unwrap());
    let (result, began, _) = simulated(&[Nothing, Answer(100)], worked).await;
    assert_eq!(result.ok().unwrap().port(), 2);
    assert_eq!(began, [(2, 0)]);
}

#[tokio::test(start_paused = true)]
async fn a_final_error_ends_the_race_and_others_are_collected() {
    use Does::{Answer, Fail, Refuse};
    let (result, began, _) = simulated(&[Refuse(260), Answer(400)], None).await;
    assert!(matches!(result, Err(Failures::Final("refused"))));
    assert_eq!(began, [(1, 0), (2, 250)]);
    let (result, ..) = simulated(&[Fail(900), Fail(1)], None).await;
    let Err(Failures::All(failures)) = result else {
        panic!("no failures");
    };
    let addresses: Vec<&str> = failures.iter().map(|(address, _)| &**address).collect();
    assert_eq!(addresses, ["10.0.0.1:2", "10.0.0.1:1"]);
    let (result, ..) = simulated(&[], None).await;
    assert!(matches!(result, Err(Failures::All(failures)) if failures.is_empty()));
}

/// Never passes within a test.
const NEVER: Duration = Duration::from_secs(24 * 3600);

fn at(here: &Host, name: &str, addresses: &[SocketAddr]) {
    let mut entry = here.endpoint.trust().by_name(name).unwrap().unwrap();
    entry.addresses = addresses.iter().map(SocketAddr::to_string).collect();
    here.endpoint.trust().add(entry).unwrap();
}

fn address(host: &Host) -> SocketAddr {
    host.endpoint.local_address().unwrap()
}

/// Returns two hosts that trust each other, of which the first waits for handshakes forever.
fn patient_pair() -> (Host, Host) {
    let (here, there) = (host(NEVER), host(NEVER));
    trust(&here, "there", &there);
    trust(&there, "here", &here);
    (here, there)
}

async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.unwrap();
}

/// Returns the number of peers' connections that the endpoint counts.
fn counted(endpoint: &Endpoint) -> usize {
    let connections = endpoint.inner.connections();
    let alive = connections.values().flatten();
    alive.filter(|connection| connection.is_alive()).count()
}

#[tokio::test]
async fn a_silent_address_does_not_delay_the_next_one() {
    let (here, there) = patient_pair();
    let silent = StdSocket::bind("127.0.0.1:0").unwrap();
    at(
        &here,
        "there",
        &[silent.local_addr().unwrap(), address(&there)],
    );
    // The silent address would take a day.
    let connected = tokio::time::timeout(LONG, here.endpoint.connect("there"));
    let control = connected.await.unwrap().unwrap();
    assert_eq!(control.peer().address, address(&there));
    // It was dialled, and is not the first one the next time.
    let mut bytes = [0; 2048];
    assert!(silent.recv(&mut bytes).unwrap() >= 1200);
    let worked = here
        .endpoint
        .inner
        .worked()
        .get(&there.endpoint.host_id())
        .copied();
    assert_eq!(worked, Some(address(&there)));
}

#[tokio::test]
async fn another_identity_is_an_error_of_its_address_only() {
    let (here, there) = patient_pair();
    let impostor = host(NEVER);
    at(&here, "there", &[address(&impostor), address(&there)]);
    let control = here.endpoint.connect("there").await.unwrap();
    assert_eq!(control.peer().address, address(&there));
}

#[tokio::test]
async fn an_error_names_each_address_and_why() {
    let (here, there) = (host(Duration::from_millis(500)), host(LONG));
    trust(&here, "there", &there);
    let impostor = host(LONG);
    let silent = StdSocket::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap();
    let mut entry = here.endpoint.trust().by_name("there").unwrap().unwrap();
    entry.addresses = vec![
        silent.to_string(),
        address(&impostor).to_string(),
        "no such name:7400".to_owned(),
    ];
    here.endpoint.trust().add(entry).unwrap();
    let error = here.endpoint.connect("there").await.unwrap_err();
    let ConnectError::Unreachable { tried, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(tried.len(), 3);
    let text = error.to_string();
    assert!(
        text.contains(&format!("{silent}: the connection timed out")),
        "{text}"
    );
    let found = impostor.endpoint.host_id();
    let other = format!(
        "{}: a host with another identity answers, {found}",
        address(&impostor)
    );
    assert!(text.contains(&other), "{text}");
    assert!(text.contains("no such name:7400: "), "{text}");
}

#[tokio::test]
async fn one_other_identity_at_every_address_is_a_changed_identity() {
    let (here, _there) = patient_pair();
    let impostor = host(NEVER);
    let relayed = Held::new(address(&impostor)).await;
    relayed.release();
    at(&here, "there", &[address(&impostor), relayed.address]);
    let error = here.endpoint.connect("there").await.unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, ConnectError::IdentityChanged { .. }),
        "{text}"
    );
    assert!(text.contains(&address(&impostor).to_string()), "{text}");
    assert!(text.contains(&relayed.address.to_string()), "{text}");
}

#[tokio::test]
async fn losers_leave_no_connection_at_the_peer() {
    let (here, there) = patient_pair();
    let held = Held::new(address(&there)).await;
    at(&here, "there", &[held.address, address(&there)]);
    let (control, accepted) = tokio::join!(here.endpoint.connect("there"), there.endpoint.accept());
    let (control, accepted) = (control.unwrap(), accepted.unwrap());
    assert_eq!(control.peer().address, address(&there));
    // Now the peer gets everything that was sent on the losing attempt, and its end.
    held.release();
    let quic = &there.endpoint.inner.quic;
    until(|| quic.stats().accepted_handshakes == 2).await;
    until(|| quic.open_connections() == 1).await;
    assert_eq!(counted(&there.endpoint), 1);
    assert!(control.link.lost().is_none() && accepted.link.lost().is_none());
}

#[tokio::test]
async fn a_loser_after_its_handshake_leaves_no_connection_either() {
    let (here, there) = pair(LONG);
    let dial = Dial {
        expected: Some(there.endpoint.host_id()),
        name: "there".to_owned(),
        alpn: ALPN_CONTROL,
        limit: RateLimit::default(),
        paths: Vec::new(),
    };
    let loser = here
        .endpoint
        .inner
        .dial(&dial, address(&there))
        .await
        .unwrap();
    until(|| counted(&there.endpoint) == 1).await;
    drop(loser);
    until(|| counted(&there.endpoint) == 0).await;
    // The next control connection is the first one that the peer sees.
    let (control, accepted) = tokio::join!(here.endpoint.connect("good"), there.endpoint.accept());
    assert!(control.is_ok() && accepted.is_some());
    assert_eq!(counted(&there.endpoint), 1);
}

/// Forwards datagrams between one client and a server, once it is released.
struct Held {
    address: SocketAddr,
    released: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Held {
    async fn new(server: SocketAddr) -> Self {
        let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let inside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = outside.local_addr().unwrap();
        let (released, mut wait) = watch::channel(false);
        let task = tokio::spawn(async move {
            wait.wait_for(|released| *released).await.unwrap();
            let (mut out, mut back) = ([0; 2048], [0; 2048]);
            let mut client = None;
            loop {
                tokio::select! {
                    received = outside.recv_from(&mut out) => {
                        let (length, from) = received.unwrap();
                        client = Some(from);
                        inside.send_to(&out[..length], server).await.unwrap();
                    }
                    received = inside.recv_from(&mut back) => {
                        let (length, _) = received.unwrap();
                        outside.send_to(&back[..length], client.unwrap()).await.unwrap();
                    }
                }
            }
        });
        Self {
            address,
            released,
            task,
        }
    }

    fn release(&self) {
        self.released.send(true).unwrap();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.task.abort();
    }
}
