//! QMP with a domain's QEMU through libvirt, which owns the control socket. To who uses it, it is a
//! control socket: [`longhaul_hypervisor::qmp::Qmp`] runs over it.

use crate::connection::{Connection, LibvirtError, Procedure};
use crate::domain::Domain;
use crate::message::{Message, QEMU};
use crate::xdr::{Reader, Writer, XdrError};
use longhaul_hypervisor::qmp::{Qmp, QmpError};
use serde_json::{Map, Value, json};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Mutex;
use tokio::sync::mpsc::Receiver;
use tokio::task::spawn_blocking;

const EVENT_REGISTER: Procedure = Procedure::qemu(4, "CONNECT_DOMAIN_MONITOR_EVENT_REGISTER");
/// The time limit for a QEMU to answer for the first time.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// The number of the procedure by which the daemon reports an event.
const EVENT: i32 = 6;

/// An event of a QEMU.
struct QemuEvent {
    uuid: [u8; 16],
    line: Value,
}

impl QemuEvent {
    fn read(payload: &[u8]) -> Result<Self, XdrError> {
        let mut reader = Reader::new(payload);
        let _callback = reader.i32()?;
        let domain = Domain::read(&mut reader)?;
        let name = reader.text()?.to_owned();
        let (seconds, microseconds) = (reader.u64()?, reader.u32()?);
        let details = reader.optional(Reader::text)?;
        let data = details.and_then(|details| serde_json::from_str::<Value>(details).ok());
        reader.end()?;
        let mut line = json!({
            "event": name,
            "timestamp": {"seconds": seconds, "microseconds": microseconds},
        });
        if let Some(data) = data {
            line["data"] = data;
        }
        Ok(Self {
            uuid: domain.uuid,
            line,
        })
    }
}

impl Connection {
    /// Lets the daemon report all events of the QEMU of a domain on this connection.
    fn watch(&self, domain: &Domain) -> Result<(), LibvirtError> {
        let mut arguments = Writer::default();
        arguments.u32(1);
        domain.write(&mut arguments);
        // Every event, whatever its name is.
        arguments.optional_text(None).u32(0);
        self.ask(EVENT_REGISTER, arguments, |it| it.i32().map(drop))
    }
}

/// Opens QMP with the QEMU of a domain. The connection lives as long as this and its clones do, and
/// with it the jobs that were begun on it.
///
/// # Errors
/// When the domain does not run, or does not answer within the time.
pub async fn open(
    connection: &Connection,
    domain: &Domain,
    within: Duration,
) -> Result<Qmp, LibvirtError> {
    let (ours, theirs) = UnixStream::pair().map_err(|error| LibvirtError::Connect {
        path: connection.path().to_owned(),
        why: error.to_string(),
    })?;
    let events = connection.events();
    let (watching, watched) = (connection.clone(), domain.clone());
    let version = spawn_blocking(move || {
        watching.watch(&watched)?;
        watching.monitor_command(&watched, r#"{"execute":"query-version"}"#)
    });
    let version = version.await.map_err(|error| broke(connection, &error))??;
    let version: Value = serde_json::from_str(&version).unwrap_or_default();
    let (reader, writer) = theirs.into_split();
    let line = Line {
        connection: connection.clone(),
        domain: domain.clone(),
        writer: Arc::new(Mutex::new(writer)),
    };
    let greeting = json!({"QMP": {"version": version["return"], "capabilities": []}});
    tokio::spawn(line.serve(greeting, reader, events));
    let qmp = Qmp::over(ours, connection.path(), within).await;
    qmp.map_err(|error: QmpError| LibvirtError::Connect {
        path: connection.path().to_owned(),
        why: error.to_string(),
    })
}

fn broke(connection: &Connection, error: &dyn std::fmt::Display) -> LibvirtError {
    LibvirtError::Closed {
        path: connection.path().to_owned(),
        why: error.to_string(),
        sent: false,
    }
}

#[derive(Clone)]
struct Line {
    connection: Connection,
    domain: Domain,
    writer: Arc<Mutex<OwnedWriteHalf>>,
}

impl Line {
    /// Answers commands and passes on events until the other side ends, or libvirt does.
    async fn serve(self, greeting: Value, reader: OwnedReadHalf, mut events: Receiver<Message>) {
        if self.write(&greeting).await.is_err() {
            return;
        }
        let mut lines = BufReader::new(reader).lines();
        loop {
            tokio::select! {
                line = lines.next_line() => {
                    let Ok(Some(text)) = line else { return };
                    // Each command is one call: they may be answered in any order.
                    let line = self.clone();
                    tokio::spawn(async move {
                        let answer = line.execute(&text).await;
                        // Nobody may wait for it any more.
                        let _ = line.write(&answer).await;
                    });
                }
                message = events.recv() => {
                    let Some(message) = message else { break };
                    if let Some(event) = event_of(&message, &self.domain)
                        && self.write(&event).await.is_err()
                    {
                        return;
                    }
                }
            }
        }
        // Libvirt is gone: to the other side, so is QEMU.
        let _ = self.writer.lock().await.shutdown().await;
    }

    async fn write(&self, line: &Value) -> io::Result<()> {
        let mut bytes = line.to_string().into_bytes();
        bytes.push(b'\n');
        self.writer.lock().await.write_all(&bytes).await
    }

    /// Executes one line, and returns its answer with its id.
    async fn execute(&self, text: &str) -> Value {
        let refused = |id: Value, text: String| {
            let error = json!({"class": "GenericError", "desc": text});
            json!({"id": id, "error": error})
        };
        let Ok(mut command) = serde_json::from_str::<Map<String, Value>>(text) else {
            return refused(Value::Null, "it is not QMP".to_owned());
        };
        // libvirt has ids of its own.
        let id = command.remove("id").unwrap_or_default();
        if command.get("execute").and_then(Value::as_str) == Some("qmp_capabilities") {
            // libvirt has negotiated them.
            return json!({"id": id, "return": {}});
        }
        let (connection, domain) = (self.connection.clone(), self.domain.clone());
        let command = Value::Object(command).to_string();
        let asked = spawn_blocking(move || connection.monitor_command(&domain, &command));
        let answer = match asked.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return refused(id, error.to_string()),
            Err(error) => return refused(id, error.to_string()),
        };
        match serde_json::from_str::<Map<String, Value>>(&answer) {
            Ok(mut answer) => {
                answer.insert("id".to_owned(), id);
                Value::Object(answer)
            }
            Err(error) => refused(id, format!("libvirt's answer is no QMP: {error}")),
        }
    }
}

/// Returns the event in a message, if it is one of this domain's QEMU.
fn event_of(message: &Message, domain: &Domain) -> Option<Value> {
    let is_event = message.header.program == QEMU && message.header.procedure == EVENT;
    let event = QemuEvent::read(&message.payload)
        .ok()
        .filter(|_| is_event)?;
    (event.uuid == domain.uuid).then_some(event.line)
}
