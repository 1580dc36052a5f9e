//! QMP over a control socket that is shared with Proxmox VE.
//!
//! `pvestatd` and `qm` use the same socket, one at a time. A move holds it, and lets go of it while
//! a command of Proxmox VE needs it. To who uses it, it is a control socket that is never closed:
//! [`longhaul_hypervisor::qmp::Qmp`] runs over it.

use longhaul_hypervisor::qmp::Qmp;
use serde_json::{Map, Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

/// The time limit for QEMU to answer what it was asked before its socket is let go.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// An order to the task of a relay.
#[derive(Debug)]
enum Order {
    /// Close the connection to QEMU when all commands have been answered.
    Release(oneshot::Sender<()>),
    /// Connect again.
    Hold(oneshot::Sender<io::Result<()>>),
}

/// A relay to the control socket of one QEMU. It ends with the [`Qmp`] over it.
#[derive(Debug)]
pub struct Relay(mpsc::Sender<Order>);

/// A connection to QEMU that has negotiated.
struct Upstream {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
    greeting: Value,
}

impl Upstream {
    async fn open(socket: &Path) -> io::Result<Self> {
        let (reader, mut writer) = UnixStream::connect(socket).await?.into_split();
        let mut lines = BufReader::new(reader).lines();
        let ended = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let greeting = lines.next_line().await?.ok_or_else(ended)?;
        let greeting = serde_json::from_str(&greeting)?;
        writer
            .write_all(b"{\"execute\":\"qmp_capabilities\"}\n")
            .await?;
        loop {
            let line = lines.next_line().await?.ok_or_else(ended)?;
            if answer(&line).is_some() {
                break;
            }
        }
        Ok(Self {
            lines,
            writer,
            greeting,
        })
    }

    async fn open_within(socket: &Path, within: Duration) -> io::Result<Self> {
        match tokio::time::timeout(within, Self::open(socket)).await {
            Ok(opened) => opened,
            Err(_) => {
                let text = "another program uses QEMU's control socket";
                Err(io::Error::other(text))
            }
        }
    }
}

/// Returns a line if it is an answer, and no event.
fn answer(line: &str) -> Option<Map<String, Value>> {
    let message = serde_json::from_str::<Map<String, Value>>(line).ok()?;
    (!message.contains_key("event")).then_some(message)
}

/// Opens QMP with a QEMU of Proxmox VE.
///
/// # Errors
/// When QEMU does not answer within the time.
pub async fn open(socket: &Path, within: Duration) -> Result<(Qmp, Relay), String> {
    let upstream = Upstream::open_within(socket, within).await;
    let upstream = upstream.map_err(|error| format!("{}: {error}", socket.display()))?;
    let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
    let (orders, ordered) = mpsc::channel(1);
    let (client, writer) = theirs.into_split();
    let serving = Serving {
        socket: socket.to_owned(),
        within,
        client: BufReader::new(client).lines(),
        writer,
        upstream: Some(upstream),
        unanswered: 0,
        release: None,
    };
    tokio::spawn(async move {
        if let Err(error) = serving.serve(ordered).await {
            tracing::debug!(%error, "a relay of QMP has ended");
        }
    });
    let qmp = Qmp::over(ours, socket, within).await;
    let qmp = qmp.map_err(|error| error.to_string())?;
    Ok((qmp, Relay(orders)))
}

impl Relay {
    /// Lets another program use the control socket while `work` runs. Commands wait meanwhile, and
    /// events of that time are not seen.
    ///
    /// # Errors
    /// When QEMU does not answer what it was asked before. `work` was not begun then.
    pub async fn without<T>(&self, work: impl Future<Output = T>) -> Result<T, String> {
        let (done, released) = oneshot::channel();
        let sent = self.0.send(Order::Release(done)).await;
        if sent.is_ok() {
            match tokio::time::timeout(RELEASE_TIMEOUT, released).await {
                // A QEMU that has ended needs no release.
                Ok(_) => {}
                Err(_) => return Err("QEMU does not answer on its control socket".to_owned()),
            }
        }
        let result = work.await;
        let (done, held) = oneshot::channel();
        if self.0.send(Order::Hold(done)).await.is_ok()
            && let Ok(Err(error)) = held.await
        {
            tracing::debug!(%error, "the control socket is not held again");
        }
        Ok(result)
    }
}

struct Serving {
    socket: PathBuf,
    within: Duration,
    client: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
    upstream: Option<Upstream>,
    /// Commands that QEMU has not answered.
    unanswered: usize,
    release: Option<oneshot::Sender<()>>,
}

impl Serving {
    /// Passes lines on, until either side ends.
    async fn serve(mut self, mut orders: mpsc::Receiver<Order>) -> io::Result<()> {
        if let Some(upstream) = &self.upstream {
            let greeting = upstream.greeting.clone();
            self.tell(&greeting.to_string()).await?;
        }
        let mut ordered = true;
        loop {
            if self.unanswered == 0
                && let Some(done) = self.release.take()
            {
                self.upstream = None;
                // Who waited may have given up.
                let _ = done.send(());
            }
            let passes = self.upstream.is_some() && self.release.is_none();
            let from_qemu = async {
                match &mut self.upstream {
                    Some(upstream) => upstream.lines.next_line().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                order = orders.recv(), if ordered => match order {
                    Some(Order::Release(done)) => self.release = Some(done),
                    Some(Order::Hold(done)) => {
                        let opened = Upstream::open_within(&self.socket, self.within).await;
                        let held = opened.map(|upstream| self.upstream = Some(upstream));
                        let failed = held.is_err();
                        // Who waited may have given up.
                        let _ = done.send(held);
                        if failed {
                            return Ok(());
                        }
                    }
                    // The lease has ended; its QMP may have clones.
                    None => ordered = false,
                },
                line = self.client.next_line(), if passes => match line? {
                    Some(line) => self.pass_on(&line).await?,
                    None => return Ok(()),
                },
                line = from_qemu => match line? {
                    Some(line) => {
                        if answer(&line).is_some() {
                            self.unanswered = self.unanswered.saturating_sub(1);
                        }
                        self.tell(&line).await?;
                    }
                    // Dropping the other end tells it that QEMU has ended.
                    None => return Ok(()),
                },
            }
        }
    }

    async fn pass_on(&mut self, line: &str) -> io::Result<()> {
        let command = serde_json::from_str::<Map<String, Value>>(line).unwrap_or_default();
        if command.get("execute").and_then(Value::as_str) == Some("qmp_capabilities") {
            // They were negotiated at the connection.
            let id = command.get("id").cloned().unwrap_or_default();
            return self
                .tell(&json!({"id": id, "return": {}}).to_string())
                .await;
        }
        if let Some(upstream) = &mut self.upstream {
            upstream.writer.write_all(line.as_bytes()).await?;
            upstream.writer.write_all(b"\n").await?;
            self.unanswered += 1;
        }
        Ok(())
    }

    async fn tell(&mut self, line: &str) -> io::Result<()> {
        self.writer.write_all(line.as_bytes()).await?;
        self.writer.write_all(b"\n").await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::net::UnixListener;

    const WITHIN: Duration = Duration::from_secs(5);

    /// A QEMU that serves one client at a time, and answers each command with the number of its
    /// client.
    fn qemu(listener: UnixListener) -> Arc<AtomicUsize> {
        let connected = Arc::new(AtomicUsize::new(0));
        let now = connected.clone();
        tokio::spawn(async move {
            let mut number = 0;
            while let Ok((stream, _)) = listener.accept().await {
                number += 1;
                now.store(number, Ordering::SeqCst);
                let (reader, mut writer) = stream.into_split();
                let greeting = b"{\"QMP\":{\"version\":{\"qemu\":{\"major\":10,\"minor\":0,\
                    \"micro\":0},\"package\":\"\"},\"capabilities\":[]}}\n";
                // A client that gave up waiting is gone.
                let _ = writer.write_all(greeting).await;
                let mut lines = BufReader::new(reader).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    let command: Value = serde_json::from_str(&line).unwrap();
                    let answer = json!({"id": command["id"], "return": {"client": number}});
                    let event = json!({"event": "RESUME", "timestamp": {}});
                    let text = format!("{event}\n{answer}\n");
                    let _ = writer.write_all(text.as_bytes()).await;
                }
            }
        });
        connected
    }

    #[tokio::test]
    async fn another_program_gets_the_socket_meanwhile() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("100.qmp");
        let connected = qemu(UnixListener::bind(&socket).unwrap());
        let (qmp, relay) = open(&socket, WITHIN).await.unwrap();
        let asked = async || qmp.query("query-status").await.unwrap()["client"].clone();
        assert_eq!(asked().await, 1);
        // Nobody else is served while it is held.
        let refused = Upstream::open_within(&socket, Duration::from_millis(100)).await;
        assert!(refused.is_err());
        let other = relay.without(async {
            let other = Upstream::open_within(&socket, WITHIN).await;
            assert!(other.is_ok());
            // What is asked meanwhile is answered afterwards.
            let qmp = qmp.clone();
            vec![tokio::spawn(async move { qmp.query("query-status").await })]
        });
        let waiting = other.await.unwrap().remove(0);
        let answer = waiting.await.unwrap().unwrap();
        let last = connected.load(Ordering::SeqCst);
        assert_eq!(answer["client"], last);
        assert!(last >= 3);
        assert_eq!(asked().await, last);
    }

    #[tokio::test]
    async fn it_ends_with_qemu() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("100.qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let served = tokio::spawn(async move {
            let connected = qemu(listener);
            tokio::time::sleep(Duration::from_millis(50)).await;
            connected
        });
        let (qmp, relay) = open(&socket, WITHIN).await.unwrap();
        served.await.unwrap();
        let gone = relay.without(async { std::fs::remove_file(&socket) });
        gone.await.unwrap().unwrap();
        tokio::time::timeout(WITHIN, qmp.closed()).await.unwrap();
    }
}
