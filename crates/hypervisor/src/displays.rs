//! Finds the remote displays of a guest, which belong to its QEMU and stay behind in a move.

use crate::qmp::{Qmp, QmpError};
use serde_json::Value;

/// Returns the addresses at which a guest's QEMU shows its screen, such as `VNC at 127.0.0.1:5901`.
///
/// # Errors
/// When QEMU does not answer. One that was built without a display is no error.
pub async fn displays(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    let ask = async |command| match qmp.query(command).await {
        Err(error) if error.is_unknown_command() => Ok(Value::Null),
        answer => answer,
    };
    let (vnc, spice) = tokio::try_join!(ask("query-vnc-servers"), ask("query-spice"))?;
    Ok(shown(&vnc, &spice))
}

fn shown(vnc: &Value, spice: &Value) -> Vec<String> {
    let servers = vnc.as_array().into_iter().flatten();
    let addresses = servers.flat_map(|server| server["server"].as_array().into_iter().flatten());
    let mut shown: Vec<String> = addresses
        .map(|address| {
            let host = address["host"].as_str().unwrap_or_default();
            let service = address["service"].as_str().unwrap_or_default();
            match address["family"].as_str() {
                Some("unix") => format!("VNC at {service}"),
                Some("ipv6") => format!("VNC at [{host}]:{service}"),
                _ => format!("VNC at {host}:{service}"),
            }
        })
        .collect();
    if spice["enabled"] == true {
        let port = |key: &str| spice[key].as_u64();
        shown.push(match port("port").or(port("tls-port")) {
            Some(port) => format!("SPICE at port {port}"),
            None => "SPICE".to_owned(),
        });
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn servers_are_shown_by_their_addresses() {
        let server = |family: &str, host: &str, at: &str| -> Value {
            json!({"family": family, "host": host, "service": at})
        };
        let vnc = json!([
            {"id": "default", "server": [server("ipv4", "127.0.0.1", "5901"),
                                         server("ipv6", "::1", "5901")]},
            {"id": "other", "server": [server("unix", "", "/run/vnc.sock")]},
            {"id": "reverse", "server": []},
        ]);
        let expected = [
            "VNC at 127.0.0.1:5901",
            "VNC at [::1]:5901",
            "VNC at /run/vnc.sock",
        ];
        assert_eq!(shown(&vnc, &json!({"enabled": false})), expected);
        let spice = json!({"enabled": true, "port": 5930, "host": "0.0.0.0"});
        assert_eq!(shown(&Value::Null, &spice), ["SPICE at port 5930"]);
        assert_eq!(shown(&Value::Null, &json!({"enabled": true})), ["SPICE"]);
        assert!(shown(&Value::Null, &Value::Null).is_empty());
    }
}
